"""Checkpoint folders for tests: a copy of the reference's to spoil, or a new random one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from clover_jax.config import BaseConfig, RopeConfig
from clover_jax.models.base import BaseModel
from clover_jax.models.decoder import Decoder, causal_mask

Tensors = dict[str, np.ndarray]

TINY = BaseConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(theta=10_000.0),
    eos_token_ids=(2,),
)


def random_base(directory: Path, config: BaseConfig = TINY, seed: int = 0) -> BaseModel:
    """Return a base with random params that has no files but an empty folder."""
    ids = jnp.zeros((1, 2), jnp.int32)
    init = jax.jit(Decoder(config).init)
    params = init(jax.random.key(seed), ids, ids, causal_mask(1, 2))["params"]
    return BaseModel(config=config, params=params, directory=directory, source="random")


def copy_of(source: Path, target: Path) -> Path:
    """Copy a checkpoint folder."""
    shutil.copytree(source, target)
    return target


def edit_tensors(directory: Path, edit: Callable[[Tensors], Any]) -> None:
    """Rewrite model.safetensors after `edit` has changed the tensors in place."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; the value ... removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def assert_trees_equal(a: Any, b: Any) -> None:
    """Assert the same structure, dtypes and values."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, leaf in jax.tree_util.tree_leaves_with_path(a):
        other = b
        for key in path:
            other = other[key.key]
        assert leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=str(path))
