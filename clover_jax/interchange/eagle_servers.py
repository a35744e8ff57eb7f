"""EAGLE-1 heads as vLLM and SGLang read them: the official tensors, small print apart.

Sources: vLLM's llama_eagle.py (for the method "eagle") and SGLang's of the same name. vLLM builds
`fc` without a bias and stops at one; SGLang always builds it with a bias and leaves one that is not
stored as it happens to be. SGLang knows the class by its own name, and takes a field `bias`, which
EAGLE's own readers take for that of `fc`, for biases of q, k, v and o; these it has together or not
at all. Either folder is read back as an EAGLE head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from clover_jax.drafters.eagle import EagleConfig
from clover_jax.errors import UserError
from clover_jax.interchange import eagle
from clover_jax.interchange.llama_fields import llama_fields
from clover_jax.pretrained.base import BaseModel


def check_for_vllm(config: EagleConfig) -> None:
    """Raise UserError for a head that vLLM does not load."""
    eagle.check_exportable(config)
    if config.fc_bias:
        raise UserError(
            "this head's fc has a bias, and vLLM's reader of EAGLE-1 heads has none; train with "
            "--drafter_options=fc_bias=false to export it"
        )


def check_for_sglang(config: EagleConfig) -> None:
    """Raise UserError for a head that SGLang runs differently."""
    eagle.check_exportable(config)
    layer = config.layer
    if layer.mlp_bias or layer.qkv_bias != layer.output_bias:
        raise UserError(
            f"this head's layer has qkv_bias {layer.qkv_bias}, output_bias {layer.output_bias} and "
            f"mlp_bias {layer.mlp_bias}, but SGLang's has one attention_bias and none in its MLP; "
            "train with --drafter_options=llama_layer=true to export it"
        )


def sglang_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    """Return what config.json holds for SGLang."""
    return {"architectures": ["LlamaForCausalLMEagle"], **llama_fields(config, base.config)}


def bias_of_fc(config: EagleConfig) -> dict[str, np.ndarray]:
    """Return a bias of zeros where the head has none."""
    zeros = np.zeros(config.layer.hidden_size, np.float32)
    return {} if config.fc_bias else {"fc.bias": zeros}


VLLM = dataclasses.replace(
    eagle.LAYOUT, name="eagle_vllm", to="eagle_vllm", check_exportable=check_for_vllm
)
SGLANG = dataclasses.replace(
    eagle.LAYOUT,
    name="eagle_sglang",
    to="eagle_sglang",
    config_fields=sglang_fields,
    check_exportable=check_for_sglang,
    more_tensors=bias_of_fc,
)
