"""Params in a folder of orbax's, written and read leaf by leaf: at most one is in memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from clover_jax.interchange.params_folder import file_hashes
from clover_jax.pretrained.tensor_map import Path as LeafPath
from clover_jax.pretrained.tensor_map import nested

CHUNK_BYTES = 2**22  # what storage encodes and decodes at once


@dataclasses.dataclass(frozen=True)
class LazyLeaf:
    """A leaf that is made when its turn to be written comes.

    make: returns the array, of this shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def ndim(self) -> int:
        """Number of axes, which orbax asks for."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, which orbax asks for."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array, which orbax asks for."""
        return self.size * self.dtype.itemsize


def save_leaves(folder: Path, leaves: Mapping[LeafPath, LazyLeaf]) -> dict[str, str]:
    """Write leaves one after the other to a new folder, readable by `restore_params`.

    Returns relative file name -> SHA-256, as `save_params` does.
    """
    tree = nested(leaves)
    save_args = nested(dict.fromkeys(leaves, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)))
    registry = ocp.type_handlers.create_type_handler_registry(
        (LazyLeaf, _LazyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # without it orbax complains
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    return file_hashes(folder)


def read_leaf(folder: Path, path: LeafPath) -> np.ndarray:
    """Return one leaf as it is stored."""
    item = nested({path: 0})
    wanted = nested({path: ocp.RestoreArgs(restore_type=np.ndarray)})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=wanted, partial_restore=True)
        value: Any = checkpointer.restore(folder.absolute(), args=arguments)
    for key in path:
        value = value[key]
    return value


class _LazyHandler(ocp.type_handlers.NumpyHandler):
    """Writes leaves in turn, each chunk by chunk; what is written looks like any NumPy array."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        """Make and write one leaf, and let go of it before the next is made."""
        for index, (leaf, info) in enumerate(zip(values, infos, strict=True)):
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
        steps = store.chunk_layout.write_chunk.shape
        corners = (range(0, size, step) for size, step in zip(value.shape, steps, strict=True))
        for corner in itertools.product(*corners):
            ends = (
                min(start + step, size)
                for start, step, size in zip(corner, steps, value.shape, strict=True)
            )
            part = tuple(slice(start, end) for start, end in zip(corner, ends, strict=True))
            await store[part].write(value[part])
