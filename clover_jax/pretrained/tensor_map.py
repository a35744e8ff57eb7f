"""A declarative map between stored tensors and the leaves of our params, usable in both directions.

PyTorch checkpoints hold [out, in] matrices, one per projection; our leaves are fused and split in
heads. A leaf lists its pieces: a stored tensor each, and the part of the leaf that it fills after a
reshape and a permutation of axes. Values do not change, so writing is exactly reading backwards.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from clover_jax.array_types import Params

Path = tuple[str, ...]
Place = Callable[[Path, Any], jax.Array]  # of an array on the host or on a device


@dataclasses.dataclass(frozen=True)
class Piece:
    """One stored tensor and the part of a leaf that it fills.

    name: the stored tensor's name.
    shape: its stored shape.
    split: the shape it is reshaped to ...
    axes: ... and the permutation applied then.
    index: the part of the leaf that it fills; `...` alone is the whole leaf.
    part: what it takes of the stored tensor, where several pieces share one.

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
        return leaf[self.index].transpose(np.argsort(self.axes))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of our params.

    path: its keys, from the root of the tree.
    shape: its shape.
    pieces: the stored tensors that make it up.
    """

    path: Path
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def whole(path: Path, name: str, shape: tuple[int, ...]) -> Leaf:
    """Return the leaf that is stored as it is."""
    return Leaf(path, shape, (Piece(name, shape, shape, tuple(range(len(shape)))),))


def transposed(path: Path, name: str, shape: tuple[int, int]) -> Leaf:
    """Return the [in, out] leaf whose stored tensor is [out, in]."""
    return Leaf(path, shape, (Piece(name, shape[::-1], shape[::-1], (1, 0)),))


def stored_shapes(leaves: Iterable[Leaf]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every stored tensor that the leaves need."""
    return {piece.name: piece.shape for leaf in leaves for piece in leaf.pieces}


def assemble(leaves: Iterable[Leaf], read: Callable[[str], np.ndarray], place: Place) -> Params:
    """Read every leaf and return the tree of placed arrays.

    read: returns a stored tensor by name; called once for each leaf that has a part of it.
    place: puts a finished leaf on its device (or its shards). Each is released before the next
        one is read, so that the host holds one leaf at a time beside the result.
    """
    return nested({leaf.path: place(leaf.path, fuse(leaf, read)) for leaf in leaves})


def nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the tree of leaves by path: {("a", "b"): x} gives {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = value
    return tree


def fuse(leaf: Leaf, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return one leaf, made of its stored pieces."""
    first, *others = leaf.pieces
    # A leaf of one piece stays a view: nothing is copied before it is placed.
    stored = read(first.name)
    part = first.to_ours(stored)
    if not others:
        return part

    fused = np.empty(leaf.shape, part.dtype)
    fused[first.index] = part
    for before, piece in itertools.pairwise(leaf.pieces):
        stored = stored if piece.name == before.name else read(piece.name)
        fused[piece.index] = piece.to_ours(stored)
    return fused
