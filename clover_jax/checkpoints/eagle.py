"""EAGLE-1, -2 and -3 heads: a Llama config, one layer and `fc`, for EAGLE, vLLM and SGLang.

Sources: EAGLE's repository; llama_eagle.py of vLLM (for the method "eagle") and of SGLang. Readers
rotate with the config's `rope_theta`, or with 10 000 without it.

EAGLE-1 and -2: `embed_tokens` is a copy of the base's input embedding; output matrix and final norm
are the base's own and not stored. EAGLE's readers build `fc` with a bias unless the config has
`"bias": false`. vLLM builds it without a bias and fails on a stored one. SGLang always builds it
with a bias and does not initialise a missing one. SGLang has its own name for the class, and its
field `bias` means biases of q, k, v and o, all of them or none. Either folder is read back as an
EAGLE head.

EAGLE-3: the layer is called `midlayer`, and the head has its own norm and output matrix. `d2t`
holds offsets (target id = draft id + d2t), `t2d` marks the kept target ids. A head over the whole
vocabulary is written without them, as vLLM 0.32.0 requires, and read with or without. The embedding
is the base's and not stored. `fc` reads the three states that enter the base's layers 2, L // 2 and
L - 3, which are not in the config.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.layout import (
    Layout,
    check_llama_layer,
    eagle_fields,
    read_eagle_layer,
    refuse_draft_vocabulary,
)
from clover_jax.checkpoints.llama_tensors import layer_leaves, norm_leaf
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.checkpoints.tensor_map import Leaf, over_states, whole
from clover_jax.config import BaseConfig
from clover_jax.drafters import eagle, eagle3
from clover_jax.drafters.eagle import EagleConfig
from clover_jax.drafters.eagle3 import NUM_FEATURES, Eagle3Config, feature_layers
from clover_jax.errors import UserError

EMBEDDING = "embed_tokens.weight"  # a frozen copy of the base's
OFFSETS, KEPT = "d2t", "t2d"
# Fields of servers: which states a head reads, and whether it adds to the state after its norm.
STATES, NORM_FIRST = "eagle_aux_hidden_state_layer_ids", "norm_before_residual"


def parse_eagle(values: dict[str, Any], path: Path, base: BaseConfig) -> EagleConfig:
    """Turn the fields of an EAGLE-1 head's config into ours."""
    return EagleConfig(
        layer=read_eagle_layer(values, path),
        vocab_size=values["vocab_size"],
        # EAGLE's own readers take true where it is absent.
        fc_bias=bool(values.get("bias", True)),
        # The layout stores no loss; further training uses the method's.
        loss=eagle.METHOD_LOSS,
    )


def eagle1_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for an EAGLE-1 head of a base."""
    # Servers pick their reader by this class and by their own setting of the method.
    return eagle_fields(config, base.config, "LlamaForCausalLM") | {"bias": config.fc_bias}


def check_eagle(config: EagleConfig, base: BaseConfig) -> None:
    """Raise UserError for a head that EAGLE's readers would run differently."""
    refuse_draft_vocabulary(config, "EAGLE-1")
    check_llama_layer(config.layer)


def eagle_leaves(config: EagleConfig) -> list[Leaf]:
    """Return the place of the official tensors in the params of `drafters.eagle.Eagle`."""
    width = config.layer.hidden_size
    leaves = [over_states(("fc",), "fc.weight", 2, width)]  # embedding, then state
    if config.fc_bias:
        leaves.append(whole(("fc_bias",), "fc.bias", (width,)))
    # The output of `fc` enters the layer's attention without a norm.
    return leaves + layer_leaves(config.layer, ("layer",), "layers.0.", input_norm=False)


def _check_for_vllm(config: EagleConfig, base: BaseConfig) -> None:
    check_eagle(config, base)
    # Zeros could be left out; a trained bias cannot.
    if config.fc_bias:
        raise UserError(
            "this head's fc has a bias, and vLLM's reader of EAGLE-1 heads has none; train with "
            "--drafter_options=fc_bias=false to export it"
        )


def _check_for_sglang(config: EagleConfig, base: BaseConfig) -> None:
    check_eagle(config, base)
    # The only field for biases of SGLang's layer is attention_bias.
    layer = config.layer
    if layer.mlp_bias or layer.qkv_bias != layer.output_bias:
        raise UserError(
            f"this head's layer has qkv_bias {layer.qkv_bias}, output_bias {layer.output_bias} and "
            f"mlp_bias {layer.mlp_bias}, but SGLang's has one attention_bias and none in its MLP; "
            "train with --drafter_options=llama_layer=true to export it"
        )


def _zero_bias(config: EagleConfig) -> dict[str, np.ndarray]:
    # SGLang would use uninitialised memory for a missing bias.
    zeros = np.zeros(config.layer.hidden_size, np.float32)
    return {} if config.fc_bias else {"fc.bias": zeros}


def parse_eagle3(values: dict[str, Any], path: Path, base: BaseConfig) -> Eagle3Config:
    """Turn the fields of an EAGLE-3 head's config into ours, with its tensors d2t and t2d."""
    layer = read_eagle_layer(values, path)
    # The size is checked first: the tensors' shapes are compared with it.
    size, vocab_size = values.get("draft_vocab_size"), values["vocab_size"]
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise UserError(
            f"{path}: draft_vocab_size must be a whole number from 1 to vocab_size, not {size!r}"
        )

    # Fields of servers can make another head of the same tensors.
    features = feature_layers(base.num_layers)
    states = [all_states(base).index(name) for name in features]
    object_ = values.get("eagle_config")
    own = object_ if isinstance(object_, dict) else {}
    # vLLM's ids name the layers that states enter, SGLang's, in an object, those that they leave.
    # An empty list stands for the method's own states.
    for ids, wanted in ((values.get(STATES), states), (own.get(STATES), [i - 1 for i in states])):
        if ids and ids != wanted:
            raise UserError(
                f"{path}: {STATES} is {ids!r}; only heads of the method's own states, {wanted} of "
                f"a base of {base.num_layers} layers, can be read"
            )
    if values.get(NORM_FIRST):
        raise UserError(
            f"{path}: {NORM_FIRST} is {values[NORM_FIRST]!r}; only heads can be read that add to "
            "the state as it was before its norm"
        )
    return Eagle3Config(
        layer=layer,
        vocab_size=vocab_size,
        features=features,
        draft_to_target=_read_vocabulary(TensorFiles(path.parent), size, vocab_size),
        loss=eagle3.METHOD_LOSS,
    )


def _read_vocabulary(files: TensorFiles, size: int, vocab_size: int) -> tuple[int, ...] | None:
    """Return the target ids of the draft vocabulary, or None for the whole vocabulary."""
    # A head over the whole vocabulary may come with the tables or without.
    if size == vocab_size and not {OFFSETS, KEPT} & set(files.shapes):
        return None
    wanted = {OFFSETS: ((size,), "I64"), KEPT: ((vocab_size,), "BOOL")}
    for name, (shape, _) in wanted.items():
        if files.shapes.get(name) != shape:
            raise UserError(
                f"{files.directory}: tensor {name} must have shape {shape}, as config.json says; "
                f"found {files.shapes.get(name, 'none')}"
            )

    # Both hold the same ids; where they disagree, no reader can be right.
    offsets, kept = (files.read(name, types=(kind,)) for name, (_, kind) in wanted.items())
    ids = np.arange(size) + offsets
    if not np.array_equal(ids, np.flatnonzero(kept)):
        raise UserError(
            f"{files.directory}: d2t and t2d disagree: draft ids + d2t must be the ids that t2d "
            "marks, in ascending order"
        )
    return None if size == vocab_size else tuple(ids.tolist())


def all_states(base: BaseConfig) -> list[str]:
    """Return our names of the states; vLLM's id of a state is the number of layers before it."""
    return [*(f"layer_{index}" for index in range(base.num_layers)), "pre_norm"]


def vocabulary_tensors(config: Eagle3Config) -> dict[str, np.ndarray]:
    """Return d2t and t2d; nothing for a head over the whole vocabulary."""
    # vLLM has a place for them only where the vocabularies differ.
    if config.draft_vocab_size == config.vocab_size:
        return {}
    ids = np.array(config.draft_to_target, np.int64)
    kept = np.isin(np.arange(config.vocab_size), ids)
    # d2t holds offsets: a reader adds the draft id to get the target id.
    return {OFFSETS: ids - np.arange(len(ids)), KEPT: kept}


def _eagle3_fields(config: Eagle3Config, base: BaseModel) -> dict[str, Any]:
    fields = eagle_fields(config, base.config, "LlamaForCausalLMEagle3")
    return fields | {"draft_vocab_size": config.draft_vocab_size}


def _check_eagle3(config: Eagle3Config, base: BaseConfig) -> None:
    check_llama_layer(config.layer)

    # The layout does not name the states that a head reads, so they must be the method's. For a
    # small base `feature_layers` uses others, which readers do not.
    count = base.num_layers
    states = tuple(f"layer_{i}" for i in (2, count // 2, count - 3))
    if config.features != states:
        raise UserError(
            f"this head reads {', '.join(config.features)}, but readers of the official EAGLE-3 "
            f"layout give it {', '.join(states)} of a base of {count} layers"
        )


def eagle3_leaves(config: Eagle3Config, prefix: str = "midlayer.") -> list[Leaf]:
    """Return the place of the official tensors in the params of `drafters.eagle3.Eagle3`.

    prefix: of the names of the layer's tensors.
    """
    width = config.layer.hidden_size
    return [
        over_states(("fc",), "fc.weight", NUM_FEATURES, width),
        # Two norms in place of the layer's own; its attention reads both outputs, 2 D wide.
        norm_leaf(("embedding_norm",), f"{prefix}input_layernorm", width),
        norm_leaf(("state_norm",), f"{prefix}hidden_norm", width),
        *layer_leaves(config.layer, (), prefix, input_norm=False, read_width=2 * width),
        norm_leaf(("output_norm",), "norm", width),
        # A matrix of its own, with a row for each token of the draft vocabulary.
        whole(("lm_head",), "lm_head.weight", (config.draft_vocab_size, width)),
    ]


EAGLE = Layout(
    name="eagle",
    to="eagle",
    kind="eagle",
    parse_config=parse_eagle,
    leaves=eagle_leaves,
    config_fields=eagle1_fields,
    check_exportable=check_eagle,
    copies={EMBEDDING: "embedding"},
)
# Variants for two servers, which are written differently; when read, they are all EAGLE.
VLLM = dataclasses.replace(
    EAGLE, name="eagle_vllm", to="eagle_vllm", check_exportable=_check_for_vllm
)
SGLANG = dataclasses.replace(
    EAGLE,
    name="eagle_sglang",
    to="eagle_sglang",
    config_fields=lambda config, base: eagle_fields(config, base.config, "LlamaForCausalLMEagle"),
    check_exportable=_check_for_sglang,
    more_tensors=_zero_bias,
)
EAGLE3 = Layout(
    name="eagle3",
    to="eagle3",
    kind="eagle3",
    parse_config=parse_eagle3,
    leaves=eagle3_leaves,
    config_fields=_eagle3_fields,
    check_exportable=_check_eagle3,
    more_tensors=vocabulary_tensors,
    optional=(OFFSETS, KEPT),
)
