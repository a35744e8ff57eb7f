"""Which matrices --int8 quantizes, of a base and of a draft head.

    draft   the head's matrices, and a copy of lm_head that it drafts with. The base is unchanged,
            and so is the text (with sampled drafts: its distribution); only drafts and their
            acceptance may change.
    base    every layer's matrices and lm_head. The text is that of the quantized base, which
            speculation reproduces as any other base's.

Embedding lookups, norms, biases, small matrices, caches and activations stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import LeafPath, Params, Place
from clover_jax.checkpoints.base import BaseModel, lm_head_hash
from clover_jax.checkpoints.loading import load_base, place_as
from clover_jax.drafters.drafter import DRAFT_ROWS, frozen_from_base
from clover_jax.errors import UserError
from clover_jax.models.int8 import Int8Matrix, Matrix, quantize

PARTS = ("base", "draft")

# Name of a leaf, without its number -> the axes that products sum over.
INPUTS = {
    "qkv": (0,),
    "out": (0, 1, 2),
    "delta_in": (0,),
    "gate_up": (0,),
    "down": (0,),
    "expert_gate": (1,),
    "expert_up": (1,),
    "expert_down": (1,),
    "lm_head": (1,),
    # Draft heads: Attention Decoders and projectors, EAGLE's kind, Clover-LR's block, MLPs.
    "query": (0,),
    "key_value": (0,),
    "projector_0": (0,),
    "projector_1": (0, 1),
    "fc": (0, 1),
    "fuse": (0, 1),
    "token_mix": (0,),
    "block": (0,),
    "inward": (0, 1),
    "weight": (1,),
}

_quantize = jax.jit(quantize, static_argnames="inputs")


def parse_parts(words: Sequence[str]) -> tuple[str, ...]:
    """Return the parts that --int8 names, in the order of PARTS; raises UserError for others.

    words: a single string stands for words between commas.
    """
    # A caller of the library may give a list, a flag gives text.
    words = words.split(",") if isinstance(words, str) else words
    for word in words:
        if word not in PARTS:
            raise UserError(f"--int8={','.join(words)}: {word!r} is not one of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in words)


def quantization_notice(parts: Sequence[str]) -> str | None:
    """Return a warning where --int8 does not pay; None where it does."""
    if not parts or jax.default_backend() != "cpu":
        return None
    return "--int8 takes longer on CPU, which widens a matrix in memory before each product"


def load_quantized_base(
    source: str, dtype: jnp.dtype, place: Place | None, parts: Sequence[str]
) -> BaseModel:
    """Load a base as `load_base` does and quantize it as --int8 says.

    Each layer's matrices are quantized as soon as they are placed, so that a device holds at most
    one that is not. The base is still identified by lm_head as it was read.
    """
    whole = place or place_as(dtype)

    # Wrapped, so that it sees one matrix at a time.
    def place_quantized(path: LeafPath, array: np.ndarray) -> Any:  # a Matrix, in place of an array
        # lm_head waits: its hash is taken before it is rounded.
        placed = whole(path, array)
        return placed if path[-1] == "lm_head" else _quantize_leaf(path[-1], placed)

    base = load_base(source, dtype, place_quantized if "base" in parts else place)
    if not parts:
        return base
    # The hash is of the weights that were read: heads were trained for those.
    known = lm_head_hash(base)
    return dataclasses.replace(base, params=quantize_base(base.params, parts), lm_head_hash=known)


def quantize_base(params: Params, parts: Sequence[str]) -> Params:
    """Return a base's params with these parts quantized; quantized matrices stay."""
    # A tied base keeps its embedding as it was: rows are looked up there, not multiplied.
    lm_head = frozen_from_base(params).lm_head
    if "base" in parts:
        return quantize_params({**params, "lm_head": lm_head})
    if "draft" in parts:
        return {**params, DRAFT_ROWS: _quantize_leaf("lm_head", lm_head)}
    return params


def quantize_params(params: Params) -> Params:
    """Return params with the matrices of INPUTS quantized."""
    return jax.tree.map_with_path(
        lambda path, leaf: _quantize_leaf(path[-1].key, leaf),
        params,
        is_leaf=lambda leaf: isinstance(leaf, Int8Matrix),
    )


def _quantize_leaf(name: str, leaf: Matrix) -> Matrix:
    # Numbered leaves (lm_head_0 ..) are treated as their name without the number.
    inputs = INPUTS.get(name, INPUTS.get(re.sub(r"_\d+$", "", name)))
    return leaf if inputs is None or isinstance(leaf, Int8Matrix) else _quantize(leaf, inputs)
