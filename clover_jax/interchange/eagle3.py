"""The official EAGLE-3 layout: a Llama config beside `midlayer`, `fc`, own norm and own head.

Source: EAGLE's repository. `d2t` holds offsets (target id = draft id + d2t), `t2d` marks the kept
target ids. A head over the whole vocabulary is written without them, as vLLM 0.32.0 wants it, and
read with or without. The embedding is the base's and not stored; the three states that `fc` reads
are those entering the base's layers 2, L // 2 and L - 3, which the layout does not say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle3 import METHOD_LOSS, NUM_FEATURES, Eagle3Config, feature_layers
from clover_jax.errors import UserError
from clover_jax.interchange.layout import Layout
from clover_jax.interchange.llama_fields import check_llama_layer, eagle_fields, read_eagle_layer
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.llama_tensors import layer_leaves, norm_leaf
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Leaf, over_states, whole

OFFSETS, KEPT = "d2t", "t2d"
# Fields of servers: which states a head reads, and whether it adds to the one after its norm.
STATES, NORM_FIRST = "eagle_aux_hidden_state_layer_ids", "norm_before_residual"


def parse_config(values: dict[str, Any], path: Path, base: BaseConfig) -> Eagle3Config:
    """Turn the fields of a head's config into ours, with the tensors d2t and t2d beside it."""
    layer = read_eagle_layer(values, path)
    # The size is checked first: the tensors' shapes are compared with it.
    size, vocab_size = values.get("draft_vocab_size"), values["vocab_size"]
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise UserError(
            f"{path}: draft_vocab_size must be a whole number from 1 to vocab_size, not {size!r}"
        )

    _check_servers_fields(values, path, base)
    return Eagle3Config(
        layer=layer,
        vocab_size=vocab_size,
        # Not in the config: every reader takes the method's states where no field names others.
        features=feature_layers(base.num_layers),
        draft_to_target=_read_vocabulary(TensorFiles(path.parent), size, vocab_size),
        loss=METHOD_LOSS,
    )


def _check_servers_fields(values: dict[str, Any], path: Path, base: BaseConfig) -> None:
    """Raise UserError where a server's own field makes another head of the same tensors."""
    object_ = values.get("eagle_config")
    own = object_ if isinstance(object_, dict) else {}
    names = all_states(base)
    states = [names.index(name) for name in feature_layers(base.num_layers)]
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


def all_states(base: BaseConfig) -> list[str]:
    """Return our names of the states by vLLM's ids: how many of the base's layers lie before."""
    return [*(f"layer_{index}" for index in range(base.num_layers)), "pre_norm"]


def vocabulary_tensors(config: Eagle3Config) -> dict[str, np.ndarray]:
    """Return d2t and t2d; nothing for a head over the whole vocabulary."""
    if config.draft_vocab_size == config.vocab_size:
        return {}
    # vLLM keeps a place for them only where the vocabularies differ.
    ids = np.array(config.draft_to_target, np.int64)
    kept = np.isin(np.arange(config.vocab_size), ids)
    # d2t holds offsets: a reader adds the draft id to get the target id.
    return {OFFSETS: ids - np.arange(len(ids)), KEPT: kept}


def config_fields(config: Eagle3Config, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for a head of a base."""
    fields = eagle_fields(config, base.config, "LlamaForCausalLMEagle3")
    return fields | {"draft_vocab_size": config.draft_vocab_size}


def check_exportable(config: Eagle3Config, base: BaseConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    check_llama_layer(config.layer)

    # The layout does not name the states that a head reads, so they must be the method's. For a
    # small base `feature_layers` takes others, which readers do not.
    count = base.num_layers
    states = tuple(f"layer_{i}" for i in (2, count // 2, count - 3))
    if config.features != states:
        raise UserError(
            f"this head reads {', '.join(config.features)}, but readers of the official EAGLE-3 "
            f"layout give it {', '.join(states)} of a base of {count} layers"
        )


def eagle3_leaves(config: Eagle3Config, prefix: str = "midlayer.") -> list[Leaf]:
    """Return where the official tensors lie in `drafters.eagle3.Eagle3`'s params.

    prefix: of the names of the layer's tensors.
    """
    width = config.layer.hidden_size
    return [
        over_states(("fc",), "fc.weight", NUM_FEATURES, width),
        # Two norms in the place of the layer's own; its attention reads what both give, 2 D wide.
        norm_leaf(("embedding_norm",), f"{prefix}input_layernorm", width),
        norm_leaf(("state_norm",), f"{prefix}hidden_norm", width),
        *layer_leaves(config.layer, (), prefix, input_norm=False, read_width=2 * width),
        norm_leaf(("output_norm",), "norm", width),
        # A matrix of its own, with a row for each token of the draft vocabulary.
        whole(("lm_head",), "lm_head.weight", (config.draft_vocab_size, width)),
    ]


def _read_vocabulary(files: TensorFiles, size: int, vocab_size: int) -> tuple[int, ...] | None:
    """Return the target ids of the draft vocabulary; None where it is the base's own."""
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


LAYOUT = Layout(
    name="eagle3",
    to="eagle3",
    kind="eagle3",
    parse_config=parse_config,
    leaves=eagle3_leaves,
    config_fields=config_fields,
    check_exportable=check_exportable,
    more_tensors=vocabulary_tensors,
    optional=(OFFSETS, KEPT),
)
