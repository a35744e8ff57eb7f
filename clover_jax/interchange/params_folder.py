"""The params of a draft in a folder of orbax's, checked on reading: whole, and as expected."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from clover_jax.array_types import Params
from clover_jax.errors import UserError
from clover_jax.pretrained.finite import check_finite


def save_params(folder: Path, params: Params) -> dict[str, str]:
    """Write params to a new folder; return relative file name -> SHA-256 of all that was written.

    The hashes matter: the storage below notices lost files, but not every altered byte.
    """
    # One process may write while others do not: no waiting for them.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()} if jax.process_count() > 1 else None,
        barrier_sync_key_prefix="draft" if jax.process_count() > 1 else None,
    )
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder.absolute(), params)
    return file_hashes(folder)


def restore_params(folder: Path, expected: Params, dtype: jnp.dtype, files: Any) -> Params:
    """Read params, cast to `dtype`, on the default device.

    expected: the tree of ShapeDtypeStructs that the draft's config asks for.
    files: what `save_params` returned.
    Raises UserError naming a file that is missing or altered, or a tensor that is missing, extra,
        misshapen or not of finite numbers.
    """
    stored = check_folder(folder, expected, files)
    with ocp.StandardCheckpointer() as checkpointer:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), stored
        )
        params = checkpointer.restore(folder.absolute(), target)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        check_finite(np.asarray(leaf), "/".join(key.key for key in path), folder)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def check_folder(folder: Path, expected: Params, files: Any) -> Params:
    """Return the shape and dtype of each stored leaf, reading none; raises as `restore_params`."""
    _check_files(folder, files)
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(folder.absolute()).item_metadata
    if stored is None:
        raise UserError(f"{folder} holds no params that orbax can read")
    _check_tensors(folder, _shapes(stored.tree), _shapes(expected))
    return stored.tree


def file_hashes(folder: Path) -> dict[str, str]:
    """Return relative file name -> SHA-256 of every file of a folder."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            hashes[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return hashes


def _check_files(folder: Path, files: Any) -> None:
    if not isinstance(files, dict) or not files:
        raise UserError(f"{folder.parent}/draft.json does not list the files of {folder.name}/")
    found = file_hashes(folder)
    for name, wanted in files.items():
        if name not in found:
            raise UserError(f"{folder / name} is missing; was the draft copied whole?")
        if found[name] != wanted:
            raise UserError(f"{folder / name} has changed since it was written; copy it again")


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    """Return "augmenting_0/attention/qkv" -> shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): tuple(leaf.shape) for path, leaf in leaves}


def _check_tensors(
    folder: Path, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    for name, shape in expected.items():
        if name not in stored:
            raise UserError(f"{folder} lacks tensor {name}, which its draft.json asks for")
        if stored[name] != shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {stored[name]}; draft.json asks for {shape}"
            )
    for name in stored:
        if name not in expected:
            raise UserError(f"{folder} has tensor {name}, which its draft.json does not ask for")
