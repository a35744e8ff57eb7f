"""Write a base as the Hugging Face folder that `--base` and `transformers` read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from clover_jax.array_types import Params
from clover_jax.checkpoints.llama_tensors import base_leaves
from clover_jax.checkpoints.tensor_files import INDEX, SINGLE
from clover_jax.config import BaseConfig
from clover_jax.runtime.files import write_json

MAX_SHARD_BYTES = 15_000_000


def save_base(
    directory: Path, config: BaseConfig, params: Params, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write config.json and the weights, rounded to bfloat16, in shards of a limited size."""
    write_json(directory / "config.json", llama_config_values(config))
    tensors = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in export_base(params, config).items()
    }
    shards = list(_shards(tensors, max_shard_bytes))
    if len(shards) == 1:
        _write(directory / SINGLE, tensors)
        return
    places = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(directory / file_name, shard)
        places |= dict.fromkeys(shard, file_name)
    size = sum(value.nbytes for value in tensors.values())
    write_json(
        directory / INDEX,
        {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))},
    )


def export_base(params: Params, config: BaseConfig) -> dict[str, np.ndarray]:
    """Return the tensors of the base under their Hugging Face names."""
    tensors = {}
    for leaf in base_leaves(config):
        value = params
        for key in leaf.path:
            value = value[key]
        for piece in leaf.pieces:
            part = piece.unpermuted(np.asarray(value)).reshape(piece.shape)
            tensors[piece.name] = np.ascontiguousarray(part)
    return tensors


def llama_config_values(config: BaseConfig) -> dict:
    """Return the config.json of a base with default rotary positions, for old and new readers."""
    if config.rope.kind != "default":
        raise ValueError(f"rope kind ({config.rope.kind!r}) must be 'default' to be written here")
    eos = config.eos_token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "torch_dtype": "bfloat16",
    }


def round_to_bfloat16(params: Params) -> Params:
    """Return float32 params with the values that a saved base has."""
    import jax

    return jax.tree.map(
        lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), params
    )


def _write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    # Not save_file: it makes files that only their owner may read.
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def _shards(tensors: dict[str, np.ndarray], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Fill one shard after the other, in order; a tensor is never split."""
    shard: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if shard and sum(v.nbytes for v in shard.values()) + value.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = value
    yield shard
