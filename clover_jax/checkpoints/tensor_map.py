"""A declarative map between stored tensors and the leaves of our params, usable in both directions.

PyTorch checkpoints hold [out, in] matrices, one per projection; our leaves are fused and split in
heads. A leaf lists its pieces: a stored tensor each, and the part of the leaf that it fills after a
reshape and a permutation of axes. Values do not change, so writing is exactly reading backwards.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from clover_jax.array_types import LeafPath

Box = tuple[slice, ...]  # a part of an array: a slice for each of its axes
Check = Callable[[Iterable[str], np.ndarray], None]  # of a part of these tensors
_COMPUTED = 2**20  # numbers of a lazy tensor that are computed together
_TOGETHER = 8  # stored rows that are transposed together: both sides stay in the processor's cache


@dataclasses.dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a leaf that it fills.

    split, axes: the shape it is reshaped to, and the permutation applied then.
    index: the part of the leaf that it fills; `...` alone is the whole leaf.
    part: the part of the stored tensor that it takes, where several pieces share one.

    Example: k_proj [K H, D] fills qkv [D, K, G + 2, H] at index (:, :, G) with split (K, H, D)
    and axes (2, 0, 1).
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    index: tuple = (...,)
    part: tuple = (...,)

    def to_ours(self, stored: Any) -> Any:
        """Return a stored tensor in our order of axes, as a view."""
        return stored[self.part].reshape(self.split).transpose(self.axes)

    def unpermuted(self, leaf: np.ndarray) -> np.ndarray:
        """Return this piece of a leaf in the stored order, split as it is, as a view."""
        return self.in_stored_order(leaf[self.index])

    def in_stored_order(self, ours: Any) -> Any:
        """Return an array in the stored order of axes, split as it is, as a view."""
        return ours.transpose(np.argsort(self.axes))

    def within(self, box: Box) -> Box:
        """Return the box of this piece that lies in a box of its leaf.

        Example: of a box (rows, :, heads) a piece at index (:, 1) has (rows, heads).
        """
        index = () if self.index == (...,) else self.index
        # strict=False: axes after the index are whole in the piece and need no check.
        for axis, (ours, part) in enumerate(zip(index, box, strict=False)):
            if ours != slice(None) and part != slice(None):
                raise ValueError(f"axis {axis} of {box} is split between pieces")
        # A number in the index is an axis that the piece does not have.
        numbers = [axis for axis, ours in enumerate(index) if isinstance(ours, int)]
        return tuple(part for axis, part in enumerate(box) if axis not in numbers)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of our params, at `path` in their tree, made up of stored tensors."""

    path: LeafPath
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def whole(path: LeafPath, name: str, shape: tuple[int, ...]) -> Leaf:
    """Return the leaf that is stored as it is."""
    return Leaf(path, shape, (Piece(name, shape, shape, tuple(range(len(shape)))),))


def transposed(path: LeafPath, name: str, shape: tuple[int, int]) -> Leaf:
    """Return the [in, out] leaf whose stored tensor is [out, in]."""
    return Leaf(path, shape, (Piece(name, shape[::-1], shape[::-1], (1, 0)),))


def over_states(path: LeafPath, name: str, count: int, width: int) -> Leaf:
    """Return the [n, D, D] leaf stored as [D, n D], over n states side by side."""
    piece = Piece(name, (width, count * width), (width, count, width), (1, 2, 0))
    return Leaf(path, (count, width, width), (piece,))


def stored_shapes(leaves: Iterable[Leaf]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every stored tensor that the leaves need."""
    return {piece.name: piece.shape for leaf in leaves for piece in leaf.pieces}


class LazyTensor:
    """A tensor that is computed when it is read: sliced, reshaped and transposed as a view.

    `np.asarray(lazy[:, 0:128])` computes 128 columns.
    """

    def __init__(
        self, shape: tuple[int, ...], read: Callable[[Box], np.ndarray], dtype: Any = np.float32
    ):
        """Take the shape, what reads a box as a new array, and that array's type."""
        # Where each element lies along each axis: open grids, broadcast, are views that take no
        # memory, and stay such views whatever is done to them.
        self._places = tuple(np.broadcast_arrays(*np.ix_(*map(np.arange, shape))))
        self._read, self.dtype = read, np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._places[0].shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, box: Any) -> LazyTensor:
        return self._mapped(lambda place: place[box])

    def reshape(self, shape: tuple[int, ...]) -> LazyTensor:
        return self._mapped(lambda place: np.reshape(place, shape, copy=False))

    def transpose(self, axes: tuple[int, ...]) -> LazyTensor:
        return self._mapped(lambda place: place.transpose(axes))

    def _mapped(self, view: Callable[[np.ndarray], np.ndarray]) -> LazyTensor:
        mapped = copy.copy(self)
        mapped._places = tuple(map(view, self._places))
        return mapped

    def astype(self, dtype: Any) -> np.ndarray:
        return np.asarray(self).astype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Compute the smallest box that holds this view, and return the view of it."""
        # Coordinates rise along every axis: the smallest come first, the largest last.
        first, last = ([place[(end,) * place.ndim] for place in self._places] for end in (0, -1))
        box = tuple(slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True))
        part = self._read(box)

        # A step along an axis of this view moves each coordinate by as many as its place says.
        moves = zip(self._places, part.strides, strict=True)
        steps = [[s // place.itemsize * stride for s in place.strides] for place, stride in moves]
        strides = [sum(step) for step in zip(*steps, strict=True)]
        view = np.lib.stride_tricks.as_strided(part, self.shape, strides)
        return view if dtype is None else view.astype(dtype)

    def copy_to(self, target: np.ndarray) -> None:
        """Compute all of it into an array, some rows at a time: temporaries stay small."""
        step = max(1, _COMPUTED * len(self) // math.prod(self.shape))
        for start in range(0, len(self), step):
            some = slice(start, start + step)
            _copy(np.asarray(self[some], target.dtype), target[some])


class StoredLeaf:
    """One leaf in weight files: `leaf[0:512, :]` reads 512 rows, `leaf[...]` all of it."""

    def __init__(self, leaf: Leaf, stored: Mapping[str, Any], check: Check, dtype: Any):
        """Take the stored tensors by name, best as views on their files.

        check: called with their names and each part of the leaf that was read.
        dtype: of a part with pieces that are computed; others have the type of what is stored.
        """
        self.leaf, self.shape = leaf, leaf.shape
        self._stored, self._check, self._dtype = stored, check, dtype

    def __getitem__(self, box: Box | types.EllipsisType) -> np.ndarray:
        """Return a part as a new array; raises as the check does."""
        read = self._stored.__getitem__
        part = fuse(self.leaf, read, None if box is ... else box, self._dtype)
        self._check(self._stored, part)
        return part


def fuse(
    leaf: Leaf, read: Callable[[str], Any], box: Box | None = None, dtype: Any = np.float32
) -> np.ndarray:
    """Return one leaf, made of its stored pieces, or a box of it, as a new array.

    read: returns a stored tensor by name, an array or a `LazyTensor`.
    dtype: of the result where a piece is lazy; else it is that of the first piece, to which
        others are cast.
    """
    # Lengths by `range`, since a slice may end beyond its axis.
    box = box or (slice(None),) * len(leaf.shape)
    shape = [len(range(size)[part]) for size, part in zip(leaf.shape, box, strict=True)]
    stored = [read(piece.name) for piece in leaf.pieces]
    is_lazy = any(isinstance(tensor, LazyTensor) for tensor in stored)
    fused = np.empty(shape, dtype if is_lazy else stored[0].dtype)
    for piece, tensor in zip(leaf.pieces, stored, strict=True):
        ours = piece.to_ours(tensor)[piece.within(box)]
        source, target = piece.in_stored_order(ours), piece.unpermuted(fused)
        if isinstance(source, LazyTensor):
            source.copy_to(target)
        else:
            _copy(source, target)
    return fused


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy row by row of the source, which may be a file, into a view of any order."""
    # As bits: NumPy moves bfloat16 half as fast.
    if source.dtype == target.dtype:
        source, target = (x.view(f"u{x.itemsize}") for x in (source, target))
    # Where the last axis is contiguous in both, NumPy's own copy is fast.
    if source.ndim < 2 or target.strides[-1] == target.itemsize:
        target[...] = source
        return

    # A transposition. Taken whole, each element would come from another line of the cache.
    # Copied in blocks along the longest axis, for each index of the axes before it.
    longest = int(np.argmax(source.shape[:-1]))
    for outer in np.ndindex(source.shape[:longest]):
        rows, where = source[outer], target[outer]
        for start in range(0, len(rows), _TOGETHER):
            where[start : start + _TOGETHER] = rows[start : start + _TOGETHER]
