"""An orbax folder of arrays, read leaf by leaf: at most one is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from clover_jax.array_types import LeafPath, Params
from clover_jax.errors import UserError


def stored_leaves(folder: Path) -> dict[LeafPath, Any]:
    """Return the shape and dtype of each stored leaf by its path, reading no values.

    Raises UserError for a folder that holds none.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
    if metadata is None:
        raise UserError(f"{folder} holds no params that orbax can read")
    return by_path(metadata.tree)


def by_path(tree: Params) -> dict[LeafPath, Any]:
    """Return the leaves of nested dictionaries by their keys."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def read_leaf(folder: Path, path: LeafPath) -> np.ndarray:
    """Return one leaf as it is stored."""
    # A tree with this leaf alone, so that no other is read.
    item = unflatten_dict({path: 0})
    # Without these types orbax would put the leaf where it was when it was written.
    wanted = unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=wanted, partial_restore=True)
        restored: Any = checkpointer.restore(folder.absolute(), args=arguments)
    return by_path(restored)[path]
