"""A base of which only what identifies it is read, and that in parts: what conversions need."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.families import Checkpoint, read_checkpoint
from clover_jax.pretrained.shapes import base_shapes, is_shape, random_base
from clover_jax.pretrained.sources import find_directory
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Leaf, stored_shapes


class StoredMatrix:
    """A [V, D] matrix of a checkpoint whose rows are read when they are asked for.

    Example: `matrix[0:4096]` is an array of 4096 rows; no more of it is in memory.
    """

    def __init__(self, shape: tuple[int, int], rows: Callable[[int, int], np.ndarray]):
        self.shape = shape
        self._rows = rows

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return the rows of a slice without a step."""
        start, stop, _ = rows.indices(self.shape[0])
        return self._rows(start, stop)


def open_base(source: str) -> BaseModel:
    """Return a base whose params are shapes, but for its embedding and its output matrix.

    Those two can be read in slices of rows (`StoredMatrix`), which is all that a fingerprint and
    the copies in others' layouts need. Raises UserError as `load_base` does, except that a
    tokenizer is looked at only when the fingerprint is taken.
    """
    if is_shape(source):
        return random_base(source, "float32", None)
    directory = find_directory(source)
    checkpoint = read_checkpoint(directory)
    files = TensorFiles(directory)
    files.check(stored_shapes(checkpoint.leaves), harmless=checkpoint.is_harmless)
    params = base_shapes(checkpoint.config)
    matrices = {leaf.path[0]: leaf for leaf in checkpoint.leaves if leaf.path[0] in _MATRICES}
    params |= {name: _matrix(leaf, files, checkpoint) for name, leaf in matrices.items()}
    return BaseModel(checkpoint.config, params, directory, source)


_MATRICES = ("embedding", "lm_head")


def _matrix(leaf: Leaf, files: TensorFiles, checkpoint: Checkpoint) -> StoredMatrix:
    name = leaf.pieces[0].name

    def rows(start: int, stop: int) -> np.ndarray:
        # What families adjust of a matrix, they adjust row by row.
        return checkpoint.adjust(name, files.read_rows(name, start, stop))

    return StoredMatrix(leaf.shape, rows)
