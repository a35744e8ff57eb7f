"""The params of a draft in an orbax folder: checked, and written leaf by leaf."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from clover_jax.array_types import Params
from clover_jax.errors import UserError
from clover_jax.pretrained.orbax_leaves import by_path, stored_leaves
from clover_jax.pretrained.tensor_map import Path as LeafPath
from clover_jax.storage.files import hash_files

CHUNK_BYTES = 2**22  # what storage encodes and decodes at once


@dataclasses.dataclass(frozen=True)
class LazyLeaf:
    """A leaf that is made when its turn to be written comes.

    make: returns the array, of this shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    # orbax reads the following as it would of an array.
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def save_params(folder: Path, params: Params) -> dict[str, str]:
    """Write params to a new folder; return relative file name -> SHA-256 of each file.

    The hashes matter: the storage below notices lost files, but not every altered byte.
    """
    # One process may write while others do not: no waiting for them.
    several = jax.process_count() > 1
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()} if several else None,
        # A prefix of its own keeps its barriers apart from those of the training checkpoints.
        barrier_sync_key_prefix="draft" if several else None,
    )

    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder.absolute(), params)
    return hash_files(folder)


def save_leaves(folder: Path, leaves: dict[LeafPath, LazyLeaf]) -> dict[str, str]:
    """Write leaves one after the other to a new folder; return hashes as `save_params` does."""
    # A separate registry: orbax's handlers for arrays would read all values at once.
    registry = ocp.type_handlers.create_type_handler_registry(
        (LazyLeaf, _LazyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # without it orbax complains
    )
    # Orbax wants a tree of save arguments beside the tree of leaves.
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    save_args = unflatten_dict(dict.fromkeys(leaves, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)))
    arguments = ocp.args.PyTreeSave(unflatten_dict(leaves), save_args=save_args)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), args=arguments)
    return hash_files(folder)


def check_folder(folder: Path, expected: Params, files: Any) -> dict[LeafPath, Any]:
    """Return the shape and dtype of each stored leaf by its path, reading no values.

    expected: the tree of ShapeDtypeStructs that the draft's config asks for.
    files: what `save_params` or `save_leaves` returned.
    Raises UserError naming a file that is missing or altered, or a tensor that is missing, extra
        or misshapen.
    """
    # Hashes first: orbax fails in many ways on an altered file.
    if not isinstance(files, dict) or not files:
        raise UserError(f"{folder.parent}/draft.json does not list the files of {folder.name}/")
    hashes = hash_files(folder)
    for name, wanted in files.items():
        if name not in hashes:
            raise UserError(f"{folder / name} is missing; was the draft copied whole?")
        if hashes[name] != wanted:
            raise UserError(f"{folder / name} has changed since it was written; copy it again")

    # The tensors next, by name and shape. A type may differ: heads are cast as they are loaded.
    stored, asked = stored_leaves(folder), by_path(expected)
    for path, wanted in asked.items():
        name = "/".join(path)
        if path not in stored:
            raise UserError(f"{folder} lacks tensor {name}, which its draft.json asks for")
        shape = tuple(stored[path].shape)
        if shape != wanted.shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {shape}; draft.json asks for {wanted.shape}"
            )
    # An extra tensor may be a part of the head that this program would leave out.
    for path in stored:
        if path not in asked:
            raise UserError(
                f"{folder} has tensor {'/'.join(path)}, which its draft.json does not ask for"
            )
    return stored


class _LazyHandler(ocp.type_handlers.NumpyHandler):
    """Writes leaves in turn, each chunk by chunk; the result looks like any stored NumPy array."""

    def __init__(self):
        # No copies: each array is written at once, before anything can change it.
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        """Make and write one leaf, and free it before the next is made."""
        for index, (leaf, info) in enumerate(zip(values, infos, strict=True)):
            # Waited for at once, so that one array is in memory at a time.
            array = leaf.make()
            for future in await super().serialize([array], [info], args and [args[index]]):
                future.result()
            del array
        return []

    async def _open_and_write(self, value, tspec, ts_context):
        """Write chunk by chunk: written whole, an array's encoded form would all be in memory."""
        import tensorstore

        store = await tensorstore.open(
            tensorstore.Spec(tspec), create=True, open=True, context=ts_context
        )

        # Chunks as they are stored, so that none is encoded twice.
        steps: Any = store.chunk_layout.write_chunk.shape
        corners = (range(0, size, step) for size, step in zip(value.shape, steps, strict=True))
        for corner in itertools.product(*corners):
            part = tuple(
                slice(start, min(start + step, size))
                for start, step, size in zip(corner, steps, value.shape, strict=True)
            )
            await store[part].write(value[part])
