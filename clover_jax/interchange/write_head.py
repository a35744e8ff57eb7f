"""Write a stored head in another form: leaf by leaf, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from clover_jax.interchange.directory import PARAMS, Card, write_card
from clover_jax.interchange.layout import Layout
from clover_jax.interchange.params_stream import LazyLeaf, save_leaves
from clover_jax.interchange.safetensors_stream import StreamedTensor, write_safetensors
from clover_jax.interchange.stored_head import StoredHead
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.tensor_map import Leaf, Piece
from clover_jax.runtime.progress import Progress
from clover_jax.storage.files import atomic_directory

PART_BYTES = 2**24  # values on their way from a leaf to the file


def write_native(directory: Path, head: StoredHead, card: Card, progress: Progress) -> None:
    """Write a native draft directory."""

    def lazy(path) -> LazyLeaf:
        def make() -> np.ndarray:
            leaf = head.read(path)
            progress.update()
            return leaf

        return LazyLeaf(head.shapes[path], head.dtype, make)

    with atomic_directory(directory) as unfinished:
        files = save_leaves(unfinished / PARAMS, {path: lazy(path) for path in head.shapes})
        write_card(unfinished, dataclasses.replace(card, files=files))


def write_foreign(
    directory: Path, head: StoredHead, layout: Layout, base: BaseModel, progress: Progress
) -> None:
    """Write a head in a layout of others, in the type that it is stored in.

    Raises UserError for a head that the layout cannot hold.
    """
    layout.check_exportable(head.config)
    leaves = layout.leaves(head.config)
    tensors = _own_tensors(head, leaves) + _copies(head, layout, base)
    tensors += _further_tensors(head, layout)
    # Servers run a head in this type, or in float16 where none is named.
    fields = layout.config_fields(head.config, base) | {"torch_dtype": str(head.dtype)}
    with atomic_directory(directory) as unfinished:
        for _ in write_safetensors(unfinished / layout.file, tensors):
            progress.update()
        text = json.dumps(fields, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")


def num_units(head: StoredHead, layout: Layout | None) -> int:
    """Return how often writing will update its progress: leaves, or stored tensors."""
    if layout is None:
        return len(head.shapes)
    own = sum(len(leaf.pieces) for leaf in layout.leaves(head.config))
    return own + len(layout.copies) + len(layout.more_tensors(head.config))


def _own_tensors(head: StoredHead, leaves: list[Leaf]) -> list[StreamedTensor]:
    """Return the head's tensors; those of one leaf lie together, so that it is read once."""
    last: dict[tuple[str, ...], np.ndarray] = {}

    def parts(leaf: Leaf, piece: Piece) -> Iterator[np.ndarray]:
        if leaf.path not in last:
            last.clear()
            last[leaf.path] = head.read(leaf.path)
        yield from _in_parts(piece.unpermuted(last[leaf.path]))

    return [
        StreamedTensor(piece.name, head.dtype, piece.shape, parts(leaf, piece))
        for leaf in leaves
        for piece in leaf.pieces
    ]


def _copies(head: StoredHead, layout: Layout, base: BaseModel) -> list[StreamedTensor]:
    def parts(matrix) -> Iterator[np.ndarray]:
        for start, stop in _row_ranges(matrix.shape, head.dtype):
            yield np.asarray(matrix[start:stop]).astype(head.dtype)

    matrices = {"lm_head": base.lm_head, "embedding": base.params["embedding"]}
    return [
        StreamedTensor(name, head.dtype, tuple(matrices[which].shape), parts(matrices[which]))
        for name, which in layout.copies.items()
    ]


def _further_tensors(head: StoredHead, layout: Layout) -> list[StreamedTensor]:
    """Return the tensors that follow from the config, numbers in the type of the head's own."""
    tensors = []
    for name, value in layout.more_tensors(head.config).items():
        stored = value.astype(head.dtype) if value.dtype.kind == "f" else value
        tensors.append(StreamedTensor(name, stored.dtype, stored.shape, iter([stored])))
    return tensors


def _in_parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield slices along the first axis, so that a permuted view is never copied whole."""
    for start, stop in _row_ranges(array.shape, array.dtype):
        yield array[start:stop]


def _row_ranges(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[tuple[int, int]]:
    row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    step = max(1, PART_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])
