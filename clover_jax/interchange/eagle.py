"""EAGLE-1 and -2 heads: a Llama config beside one layer and `fc`, for EAGLE, vLLM and SGLang.

Sources: EAGLE's repository; llama_eagle.py of vLLM (for the method "eagle") and of SGLang. Readers
rotate with the config's `rope_theta`, 10 000 where there is none. `embed_tokens` is a copy of the
base's input embedding; output matrix and final norm are the base's own and not stored.

EAGLE's readers build `fc` with a bias unless the config has `"bias": false`. vLLM builds it without
a bias and fails on a stored one. SGLang always builds it with a bias and does not initialise a
missing one. SGLang has its own name for the class, and its field `bias` means biases of q, k, v and
o, all of them or none. Either folder is read back as an EAGLE head.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle import METHOD_LOSS, EagleConfig
from clover_jax.errors import UserError
from clover_jax.interchange.layout import Layout, refuse_draft_vocabulary
from clover_jax.interchange.llama_fields import check_llama_layer, eagle_fields, read_eagle_layer
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.llama_tensors import layer_leaves
from clover_jax.pretrained.tensor_map import Leaf, over_states, whole

EMBEDDING = "embed_tokens.weight"  # a frozen copy of the base's


def parse_config(values: dict[str, Any], path: Path, base: BaseConfig) -> EagleConfig:
    """Turn the fields of a head's config into ours."""
    return EagleConfig(
        layer=read_eagle_layer(values, path),
        vocab_size=values["vocab_size"],
        # Absent means true, as to EAGLE's own readers.
        fc_bias=bool(values.get("bias", True)),
        # The layout names no loss; a head that is trained on goes on with the method's.
        loss=METHOD_LOSS,
    )


def config_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for a head of a base."""
    # Servers pick their reader by this class and by their own setting of the method.
    return eagle_fields(config, base.config, "LlamaForCausalLM") | {"bias": config.fc_bias}


def check_exportable(config: EagleConfig, base: BaseConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    refuse_draft_vocabulary(config, "EAGLE-1")
    check_llama_layer(config.layer)


def eagle_leaves(config: EagleConfig) -> list[Leaf]:
    """Return where the official tensors lie in `drafters.eagle.Eagle`'s params."""
    width = config.layer.hidden_size
    leaves = [over_states(("fc",), "fc.weight", 2, width)]  # embedding, then state
    if config.fc_bias:
        leaves.append(whole(("fc_bias",), "fc.bias", (width,)))
    # What `fc` gives enters the layer's attention without a norm.
    return leaves + layer_leaves(config.layer, ("layer",), "layers.0.", input_norm=False)


def _check_for_vllm(config: EagleConfig, base: BaseConfig) -> None:
    check_exportable(config, base)
    # Zeros could be left out; a trained bias cannot.
    if config.fc_bias:
        raise UserError(
            "this head's fc has a bias, and vLLM's reader of EAGLE-1 heads has none; train with "
            "--drafter_options=fc_bias=false to export it"
        )


def _check_for_sglang(config: EagleConfig, base: BaseConfig) -> None:
    check_exportable(config, base)
    # One field, attention_bias, is all that SGLang's layer knows of biases.
    layer = config.layer
    if layer.mlp_bias or layer.qkv_bias != layer.output_bias:
        raise UserError(
            f"this head's layer has qkv_bias {layer.qkv_bias}, output_bias {layer.output_bias} and "
            f"mlp_bias {layer.mlp_bias}, but SGLang's has one attention_bias and none in its MLP; "
            "train with --drafter_options=llama_layer=true to export it"
        )


def _sglang_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    return eagle_fields(config, base.config, "LlamaForCausalLMEagle")


def _bias_of_fc(config: EagleConfig) -> dict[str, np.ndarray]:
    # Zeros change nothing, where SGLang would use memory as it happens to be.
    zeros = np.zeros(config.layer.hidden_size, np.float32)
    return {} if config.fc_bias else {"fc.bias": zeros}


LAYOUT = Layout(
    name="eagle",
    to="eagle",
    kind="eagle",
    parse_config=parse_config,
    leaves=eagle_leaves,
    config_fields=config_fields,
    check_exportable=check_exportable,
    copies={EMBEDDING: "embedding"},
)
# Variants for two servers differ in what is written; when read, they are all LAYOUT.
VLLM = dataclasses.replace(
    LAYOUT, name="eagle_vllm", to="eagle_vllm", check_exportable=_check_for_vllm
)
SGLANG = dataclasses.replace(
    LAYOUT,
    name="eagle_sglang",
    to="eagle_sglang",
    config_fields=_sglang_fields,
    check_exportable=_check_for_sglang,
    more_tensors=_bias_of_fc,
)
