"""A loaded base model, and its identity, so that a draft is not used with another one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig, JsonConfig
from clover_jax.data.tokenizer import load_tokenizer, template_hash, tokenizer_hash
from clover_jax.models.int8 import Int8Matrix, Matrix
from clover_jax.runtime.distributed import to_host


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A loaded base.

    config: its shapes.
    params: the tree of `models.decoder.Decoder`; empty where only the config was read.
    directory: the folder that holds its config, weights and tokenizer.
    source: the name that the user passed: a folder, a hub id, "builtin:NAME", or "shape:NAME",
        whose weights are random.
    lm_head_hash: of the output matrix before it was quantized; None where it was not.
    """

    config: BaseConfig
    params: Params = dataclasses.field(repr=False)
    directory: Path
    source: str
    lm_head_hash: str | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The type of params that are not quantized, and of activations."""
        # The embedding is never quantized.
        return self.params["embedding"].dtype

    @property
    def lm_head(self) -> Matrix:
        """The [V, D] output matrix, which is the embedding when they are tied."""
        # A tied base gets an lm_head in addition to its embedding when it is quantized.
        return self.params.get("lm_head", self.params["embedding"])


_HASHED_ROWS = 4096  # rows of lm_head brought to the host at a time


@dataclasses.dataclass(frozen=True)
class BaseFingerprint(JsonConfig):
    """The identity of a base.

    lm_head: SHA-256 of the output matrix, rounded to bfloat16: the same for any loaded dtype.
    tokenizer: hash of which token has which id; None without tokenizer files.
    chat_template: SHA-256 of the template's text; None where there is none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lm_head: str
    tokenizer: str | None = None
    chat_template: str | None = None


def fingerprint(base: BaseModel) -> BaseFingerprint:
    """Return the fingerprint of a loaded base."""
    names = {field.name for field in dataclasses.fields(BaseFingerprint)}
    shapes = {name: value for name, value in vars(base.config).items() if name in names}
    hashes: dict[str, Any] = {"lm_head": lm_head_hash(base)}

    # A folder may come without a tokenizer, for prompts of token ids.
    tokenizer = load_tokenizer(base.directory)
    if tokenizer is not None:
        hashes["tokenizer"] = tokenizer_hash(tokenizer)
        hashes["chat_template"] = template_hash(tokenizer)
    return BaseFingerprint(**shapes, **hashes)


def lm_head_hash(base: BaseModel) -> str:
    """Return SHA-256 of the output matrix as it was read: its bfloat16 values, row by row."""
    if base.lm_head_hash is not None:
        return base.lm_head_hash
    matrix = base.lm_head
    assert not isinstance(matrix, Int8Matrix)  # a quantized base keeps the hash

    digest = hashlib.sha256()
    for start in range(0, matrix.shape[0], _HASHED_ROWS):
        # bfloat16 keeps the hash of a base that is loaded in another type.
        rows = to_host(matrix[start : start + _HASHED_ROWS])
        digest.update(rows.astype(ml_dtypes.bfloat16).view(np.uint16).astype("<u2").tobytes())
    return digest.hexdigest()


def checksum(params: Params) -> str:
    """Return a short hash of all params, computed on their devices; it detects changes only."""
    # Whole numbers are summed, so it is the same however arrays are split over devices.
    sums = [(jax.tree_util.keystr(path), _sum(x)) for path, x in jax.tree.leaves_with_path(params)]
    text = json.dumps([[name, int(to_host(total))] for name, total in sums])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@jax.jit
def _sum(leaf: Array) -> Array:
    """Return the sum over a leaf of a hash of each value's bits and place."""
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
    # The place counts too: swapped rows have the same sum. The last steps of MurmurHash3 make each
    # bit depend on all others.
    for axis in range(leaf.ndim):
        bits = bits + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
        bits = bits ^ (bits >> 16)
    return bits.sum(dtype=jnp.uint32)


def described_differences(draft: BaseFingerprint, base: BaseFingerprint) -> str:
    """Return `differences` in words, "" for none: "lm_head 1a2b against 3c4d", and so on."""
    # The beginning of a hash is enough to distinguish two.
    pairs = differences(draft, base).items()
    return ", ".join(f"{name} {str(a)[:12]} against {str(b)[:12]}" for name, (a, b) in pairs)


def differences(draft: BaseFingerprint, base: BaseFingerprint) -> dict[str, tuple]:
    """Return name -> (the draft's value, the base's value) where two fingerprints disagree."""
    pairs = {
        field.name: (getattr(draft, field.name), getattr(base, field.name))
        for field in dataclasses.fields(BaseFingerprint)
    }
    # A tokenizer or chat template that one side lacks is not a difference: it is optional.
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and None not in pair}
