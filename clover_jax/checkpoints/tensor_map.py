"""A declarative map between stored tensors and the leaves of our params, usable in both directions.

PyTorch checkpoints hold [out, in] matrices, one per projection; our leaves are fused and split in
heads. A leaf lists its pieces: a stored tensor each, and the part of the leaf that it fills after a
reshape and a permutation of axes. Values do not change, so writing is exactly reading backwards.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from clover_jax.array_types import LeafPath

Box = tuple[slice, ...]  # a part of an array: a slice for each of its axes
Check = Callable[[Iterable[str], np.ndarray], None]  # of a part of these tensors
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

    def to_ours(self, stored: np.ndarray) -> np.ndarray:
        """Return a stored tensor in our order of axes, as a view."""
        return stored[self.part].reshape(self.split).transpose(self.axes)

    def unpermuted(self, leaf: np.ndarray) -> np.ndarray:
        """Return this piece of a leaf in the stored order, split as it is, as a view."""
        return self.in_stored_order(leaf[self.index])

    def in_stored_order(self, ours: np.ndarray) -> np.ndarray:
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


class StoredLeaf:
    """One leaf in weight files: `leaf[0:512, :]` reads 512 rows, `leaf[...]` all of it."""

    def __init__(self, leaf: Leaf, stored: Mapping[str, np.ndarray], check: Check):
        """Take the stored tensors by name, best as views on their files.

        check: called with their names and each part of the leaf that was read.
        """
        self.leaf, self.shape = leaf, leaf.shape
        self._stored, self._check = stored, check

    def __getitem__(self, box: Box | types.EllipsisType) -> np.ndarray:
        """Return a part as a new array; raises as the check does."""
        part = fuse(self.leaf, self._stored.__getitem__, None if box is ... else box)
        self._check(self._stored, part)
        return part


def fuse(leaf: Leaf, read: Callable[[str], np.ndarray], box: Box | None = None) -> np.ndarray:
    """Return one leaf, made of its stored pieces, or a box of it, as a new array."""
    # Lengths by `range`, since a slice may end beyond its axis.
    box = box or (slice(None),) * len(leaf.shape)
    shape = [len(range(size)[part]) for size, part in zip(leaf.shape, box, strict=True)]
    fused = None
    for piece in leaf.pieces:
        ours = piece.to_ours(read(piece.name))[piece.within(box)]
        # The result has the first piece's stored type; pieces of other types are cast to it.
        fused = np.empty(shape, ours.dtype) if fused is None else fused
        _copy(piece.in_stored_order(ours), piece.unpermuted(fused))
    assert fused is not None
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
