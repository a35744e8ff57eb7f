"""Well-known shapes as bases without a checkpoint: `shape:NAME`, random weights or none at all.

A program's cost depends on shapes and not on values, so these measure models without a
download of their weights. Their text is meaningless.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from clover_jax.array_types import FLOAT32, Params, Place
from clover_jax.checkpoints.base import BaseModel
from clover_jax.config import BaseConfig, DeltaConfig, RopeConfig
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, causal_mask

PREFIX = "shape:"
_SPREAD = 0.02  # of random weights, as models of this family are initialized
_LONG_ROPE = RopeConfig(theta=1_000_000.0)
# Options that several shapes share.
_LLAMA3: dict[str, Any] = {"rope": RopeConfig(theta=500_000.0), "max_position_embeddings": 8192}
_MISTRAL: dict[str, Any] = {"rope": _LONG_ROPE, "max_position_embeddings": 32_768}
_QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope": _LONG_ROPE,
    "max_position_embeddings": 40_960,
    "query_key_norm": True,
}


def _shape(vocabulary, width, inner, layers, heads, kv_heads, **options) -> BaseConfig:
    return BaseConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        # By default the heads together are as wide as the model.
        **({"head_dim": width // heads} | options),
    )


def _experts(number: int, per_token: int, size: int) -> dict[str, Any]:
    return {"num_experts": number, "experts_per_token": per_token, "expert_size": size}


def _qwen3_5(value_heads: int) -> dict[str, Any]:
    return {
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10_000_000.0, share=0.25),
        "max_position_embeddings": 262_144,
        "query_key_norm": True,
        "output_gate": True,
        "delta": DeltaConfig(16, value_heads, 128, 128),
        "full_attention_layers": tuple(range(3, 64, 4)),
    }


def _gemma3(width: int) -> dict[str, Any]:
    return {
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope": _LONG_ROPE,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "query_key_norm": True,
        "sliding_window": 512,
        "score_scale": 1 / 16,
        "post_norms": True,
        "activation": "gelu",
        # A layer of six sees everything.
        "full_attention_layers": tuple(range(5, 62, 6)),
        "local_rope": RopeConfig(),
        "embedding_scale": width**0.5,
    }


def _gemma4(width: int, local_kv_heads: int) -> dict[str, Any]:
    # Layers without a window have heads of 512; those with one have their own below.
    return {
        "head_dim": 512,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e6, kind="proportional", share=0.25),
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
        **dict.fromkeys(("query_key_norm", "value_norm", "keys_as_values"), True),
        "sliding_window": 1024,
        "score_scale": 1.0,
        **dict.fromkeys(("post_norms", "scaled_output"), True),
        "activation": "gelu",
        # A layer of six sees everything.
        "full_attention_layers": tuple(range(5, 60, 6)),
        "local_rope": RopeConfig(),
        "local_kv_heads": local_kv_heads,
        "local_head_dim": 256,
        "embedding_scale": width**0.5,
        "logit_cap": 30.0,
    }


# From the config.json of each.
SHAPES = {
    "llama3-8b": _shape(128_256, 4096, 14_336, 32, 32, 8, **_LLAMA3),
    "llama3-70b": _shape(128_256, 8192, 28_672, 80, 64, 8, **_LLAMA3),
    "llama3-405b": _shape(128_256, 16_384, 53_248, 126, 128, 8, **_LLAMA3),
    "llama2-7b": _shape(32_000, 4096, 11_008, 32, 32, 32, max_position_embeddings=4096),
    "vicuna-7b": _shape(32_000, 4096, 11_008, 32, 32, 32, max_position_embeddings=4096),
    "mistral-7b": _shape(32_768, 4096, 14_336, 32, 32, 8, **_MISTRAL),
    "qwen3-0.6b": _shape(151_936, 1024, 3072, 28, 16, 8, **_QWEN3, tie_word_embeddings=True),
    "qwen3-1.7b": _shape(151_936, 2048, 6144, 28, 16, 8, **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": _shape(151_936, 4096, 12_288, 36, 32, 8, **_QWEN3),
    "qwen3-30b-a3b": _shape(151_936, 2048, 6144, 48, 32, 4, **_QWEN3, **_experts(128, 8, 768)),
    "gpt-oss-20b": _shape(
        *(201_088, 2880, 2880, 24, 64, 8),
        head_dim=64,
        rope=RopeConfig(
            theta=150_000.0,
            kind="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            truncate=False,
            attention_factor=0.1 * math.log(32) + 1,
        ),
        max_position_embeddings=131_072,
        qkv_bias=True,
        output_bias=True,
        sliding_window=128,
        full_attention_layers=tuple(range(1, 24, 2)),
        sinks=True,
        expert_bias=True,
        activation="clamped",
        **_experts(32, 4, 2880),
    ),
    "mixtral-8x7b": _shape(32_000, 4096, 14_336, 32, 32, 8, **_MISTRAL, **_experts(8, 2, 14_336)),
    "gemma3-270m": _shape(262_144, 640, 2048, 18, 4, 1, **_gemma3(640)),
    "gemma3-1b": _shape(262_144, 1152, 6912, 26, 4, 1, **_gemma3(1152)),
    "gemma3-27b": _shape(
        *(262_208, 5376, 21_504, 62, 32, 16),
        **_gemma3(5376)
        | {
            "head_dim": 128,
            "rope": RopeConfig(theta=1e6, kind="linear", factor=8.0),
            "max_position_embeddings": 131_072,
            "sliding_window": 1024,
            "score_scale": 168**-0.5,  # 5376 / 32: by its config, not by the heads' width
        },
    ),
    "gemma4-31b": _shape(262_144, 5376, 21_504, 60, 32, 4, **_gemma4(5376, 16)),
    "gemma4-26b-a4b": _shape(
        *(262_144, 2816, 2112, 30, 16, 2),
        parallel_mlp=True,
        **_gemma4(2816, 8) | _experts(128, 8, 704),
    ),
    "qwen3.5-27b": _shape(248_320, 5120, 17_408, 64, 24, 4, **_qwen3_5(48)),
    "qwen3.5-35b-a3b": _shape(
        *(248_320, 2048, 512, 40, 16, 2),
        shared_expert_size=512,
        **_qwen3_5(32) | _experts(256, 8, 512),
    ),
    # Not a published model: 125M parameters, larger than a CPU's caches and quick to make.
    "llama-100m": _shape(32_000, 768, 2048, 12, 12, 4, max_position_embeddings=4096),
}
# The generic form: WIDTHxLAYERSxVOCABULARY.
_GENERIC = re.compile(r"(\d+)x(\d+)x(\d+)")


def is_shape(source: str) -> bool:
    """Return whether a base's name stands for a shape."""
    return source.startswith(PREFIX)


def shape_notice(source: str) -> str | None:
    """Return the warning for users of a shape's text or training; None for a real base."""
    if not is_shape(source):
        return None
    return f"{source} has random weights: time and memory are real, its text is meaningless"


def shape_config(source: str) -> BaseConfig:
    """Return the config of `shape:NAME[:LAYERS]` or `shape:WIDTHxLAYERSxVOCABULARY`.

    LAYERS: replaces the model's own number. The generic form, such as 512x8x8192, has heads of 64
    and an MLP of 8/3 of the width, rounded up to 64.
    Raises UserError for an unknown name or a width that heads of 64 do not fill.
    """
    # A known name, with fewer layers where a whole model would take too long.
    name, _, fewer = source.removeprefix(PREFIX).partition(":")
    if name in SHAPES and (not fewer or (fewer.isdecimal() and int(fewer) > 0)):
        config = SHAPES[name]
        return dataclasses.replace(config, num_layers=int(fewer or config.num_layers))

    sizes = _GENERIC.fullmatch(name)
    if sizes is None:
        raise UserError(
            f"{source!r} is unknown; the shapes are {', '.join(SHAPES)}, with fewer layers as in "
            "shape:llama3-8b:4, or WIDTHxLAYERSxVOCABULARY as in shape:512x8x8192"
        )
    width, layers, vocabulary = map(int, sizes.groups())
    if width % 64 or min(width, layers, vocabulary) < 1:
        raise UserError(
            f"shape {name!r}: the width ({width}) must be a multiple of 64, layers ({layers}) and "
            f"vocabulary ({vocabulary}) at least 1"
        )
    # Llama's rule: 3 matrices of 8/3 of the width have as many weights as 2 of 4 times the width.
    inner = -(-width * 8 // (3 * 64)) * 64
    return _shape(vocabulary, width, inner, layers, width // 64, width // 64)


def base_shapes(config: BaseConfig, dtype: jnp.dtype = FLOAT32) -> Params:
    """Return a base's params as ShapeDtypeStructs; allocates nothing."""

    def init() -> Params:
        # Any text will do: no param's shape depends on its length.
        ids = jnp.zeros((1, 2), jnp.int32)
        return Decoder(config).init(jax.random.key(0), ids, ids, causal_mask(1, 2))["params"]

    return cast_shapes(jax.eval_shape(init), dtype)


def cast_shapes(shapes: Params, dtype: jnp.dtype) -> Params:
    """Return the same shapes in another dtype."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def random_params(shapes: Params, seed: int, place: Place | None = None) -> Params:
    """Return random arrays of these shapes; norms are 1 and biases 0, the rest is normal.

    place: puts each where it belongs before the next one is made.
    """
    # A key for each leaf, so that leaves of one shape differ.
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    # Placed one by one, so that a device never holds a second copy.
    arrays = []
    for (path, shape), key in zip(leaves, keys, strict=True):
        name = path[-1].key
        if name == "scale":
            array = jnp.ones(shape.shape, shape.dtype)
        elif name.endswith("bias"):
            array = jnp.zeros(shape.shape, shape.dtype)
        else:
            array = _normal(key, shape.shape, shape.dtype)
        arrays.append(array if place is None else place(tuple(step.key for step in path), array))
    return jax.tree.unflatten(structure, arrays)


# Compiled once for all leaves of a shape.
_normal = jax.jit(
    lambda key, shape, dtype: jax.random.normal(key, shape, dtype) * jnp.asarray(_SPREAD, dtype),
    static_argnums=(1, 2),
)


def random_base(source: str, dtype: jnp.dtype, place: Place | None) -> BaseModel:
    """Return the base that `shape:...` stands for, with random weights and no tokenizer."""
    config = shape_config(source)
    params = random_params(base_shapes(config, dtype), 0, place)
    # A folder that does not exist, without a tokenizer and prompts.
    return BaseModel(config=config, params=params, directory=Path(source), source=source)
