"""Write a stored head in another format, with a bar: leaf by leaf, all or nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clover_jax.interchange.card import PARAMS, Card, write_card
from clover_jax.interchange.layout import Layout
from clover_jax.interchange.orbax_params import LazyLeaf, save_leaves
from clover_jax.interchange.stored_head import StoredHead
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.tensor_files import READABLE
from clover_jax.pretrained.tensor_map import Leaf, Piece
from clover_jax.pretrained.tensor_map import Path as LeafPath
from clover_jax.runtime.progress import progress_bar
from clover_jax.storage.files import atomic_directory

PART_BYTES = 2**24  # values on their way from a leaf to the file
# Readers know the last two besides the types of weights: mappings of token ids are stored so.
_TYPE_NAMES = {dtype: name for name, dtype in READABLE.items()} | {
    np.dtype(np.int64): "I64",
    np.dtype(np.bool_): "BOOL",
}


def write_native(directory: Path, head: StoredHead, card: Card) -> None:
    """Write a native draft directory."""
    bar = progress_bar(len(head.shapes), "convert", unit="tensor")

    # Made one by one while orbax writes, since a head may not fit in memory twice.
    def make(path: LeafPath) -> np.ndarray:
        leaf = head.read(path)
        bar.update()
        return leaf

    leaves = {
        path: LazyLeaf(shape, head.dtype, functools.partial(make, path))
        for path, shape in head.shapes.items()
    }
    with bar, atomic_directory(directory) as unfinished:
        files = save_leaves(unfinished / PARAMS, leaves)
        write_card(unfinished, dataclasses.replace(card, files=files))


def write_foreign(directory: Path, head: StoredHead, layout: Layout, base: BaseModel) -> None:
    """Write a head in a layout of others, in the type that it is stored in.

    Raises UserError for a head that the layout cannot hold.
    """
    # Refused before the folder is begun.
    layout.check_exportable(head.config, base.config)
    tensors = _own_tensors(head, layout.leaves(head.config)) + _copies(head, layout, base)
    tensors += _further_tensors(head, layout)

    # Servers run a head in this type, or in float16 where none is named.
    fields = layout.config_fields(head.config, base) | {"torch_dtype": str(head.dtype)}

    bar = progress_bar(len(tensors), "convert", unit="tensor")
    with bar, atomic_directory(directory) as unfinished:
        for _ in write_safetensors(unfinished / layout.file, tensors):
            bar.update()
        text = json.dumps(fields, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")


class StreamedTensor(NamedTuple):
    """One tensor: its name, type and shape, and its values in order, in parts."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterator[np.ndarray]


def write_safetensors(path: Path, tensors: Sequence[StreamedTensor]) -> Iterator[str]:
    """Write a file part by part, yielding the name of each tensor once it is written.

    The format: the header's length in 8 bytes, a JSON header padded to a multiple of 8, then the
    values without gaps.
    """
    # Wide types come first, so that each tensor is aligned.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            begin = file.tell()
            for part in tensor.parts:
                file.write(np.ascontiguousarray(part).view(np.uint8).data)
            # A missing part would shift all tensors after it, and readers would not notice.
            written = file.tell() - begin
            wanted = math.prod(tensor.shape) * tensor.dtype.itemsize
            if written != wanted:
                raise ValueError(f"{tensor.name}: {written} bytes written, {wanted} announced")
            yield tensor.name


def _own_tensors(head: StoredHead, leaves: list[Leaf]) -> list[StreamedTensor]:
    last: dict[LeafPath, np.ndarray] = {}

    def parts(leaf: Leaf, piece: Piece) -> Iterator[np.ndarray]:
        # The tensors of a leaf are written one after the other, so that it is read once. The leaf
        # before goes first: two may not fit in memory.
        if leaf.path not in last:
            last.clear()
            last[leaf.path] = head.read(leaf.path)
        # A permuted view is copied when it is written: slices of it take little memory.
        stored = piece.unpermuted(last[leaf.path])
        for rows in _row_slices(stored.shape, stored.dtype):
            yield stored[rows]

    return [
        StreamedTensor(piece.name, head.dtype, piece.shape, parts(leaf, piece))
        for leaf in leaves
        for piece in leaf.pieces
    ]


def _copies(head: StoredHead, layout: Layout, base: BaseModel) -> list[StreamedTensor]:
    # Rows at a time: an output matrix is often the largest tensor of all.
    def parts(matrix: Any) -> Iterator[np.ndarray]:
        for rows in _row_slices(matrix.shape, head.dtype):
            yield np.asarray(matrix[rows]).astype(head.dtype)

    matrices = {"lm_head": base.lm_head, "embedding": base.params["embedding"]}
    return [
        StreamedTensor(name, head.dtype, tuple(matrices[which].shape), parts(matrices[which]))
        for name, which in layout.copies.items()
    ]


def _further_tensors(head: StoredHead, layout: Layout) -> list[StreamedTensor]:
    tensors = []
    for name, value in layout.more_tensors(head.config).items():
        # Weights go in the type of the head's own; ids and masks as they are.
        stored = value.astype(head.dtype) if value.dtype.kind == "f" else value
        tensors.append(StreamedTensor(name, stored.dtype, stored.shape, iter([stored])))
    return tensors


def _row_slices(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[slice]:
    # A row at least, however wide it is.
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    step = max(1, PART_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield slice(start, start + step)
