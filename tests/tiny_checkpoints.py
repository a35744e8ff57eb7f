"""Checkpoint folders for tests to spoil, and how to compare what was loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from clover_jax.array_types import Params
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.config import BaseConfig
from tests.tiny_models import TINY

Tensors = dict[str, np.ndarray]


def random_base(directory: Path, config: BaseConfig = TINY, seed: int = 0) -> BaseModel:
    """Return a random base that has no files but a folder, which may hold a tokenizer."""
    params = random_leaves(base_shapes(config), seed)
    return BaseModel(config=config, params=params, directory=directory, source="random")


def random_leaves(shapes: Params, seed: int = 1) -> Params:
    """Return params of these shapes, for tests that do not decode: nothing is compiled for them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


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


def assert_same_tensors(one: Path, other: Path) -> None:
    """Assert that two folders hold the same tensors, bit for bit."""
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.tobytes() == other[name].tobytes(), name
