"""Load a base model: find its folder, read its config, place its tensors one by one.

Conversions need little of a base's weights, so they open it without reading them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer

from clover_jax.array_types import FLOAT32, Array
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.families import Checkpoint, read_base_config, read_checkpoint
from clover_jax.pretrained.shapes import base_shapes, is_shape, random_base, shape_config
from clover_jax.pretrained.sources import find_directory
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Leaf, Place, StoredLeaf, stored_shapes
from clover_jax.runtime.distributed import is_primary
from clover_jax.runtime.progress import progress_bar
from clover_jax.tokenizers.tokenizer import load_tokenizer

_SHOWN_FROM = 10**9  # bytes of a base whose loading is shown


def load_base(source: str, dtype: jnp.dtype = FLOAT32, place: Place | None = None) -> BaseModel:
    """Load the frozen base.

    source: a Hugging Face folder, a hub id (`owner/name`, `owner/name@revision`), "builtin:tiny",
        or "shape:NAME" for random weights (see pretrained/shapes.py).
    dtype: of the params.
    place: puts each leaf on its device or shards, `place(path, leaf) -> jax.Array`, where
        `leaf[box]` reads a part of it and `leaf[...]` all; by default all of it is cast to `dtype`
        on the default device.
    Raises UserError for anything missing, broken or unsupported, naming it.
    """
    if is_shape(source):
        return random_base(source, dtype, place)
    directory = find_directory(source)
    checkpoint = read_checkpoint(directory)
    # Both checks come before any tensor is read, which may take minutes.
    _check_tokenizer(directory, checkpoint.config)
    files = _open_files(directory, checkpoint)

    def stored(leaf: Leaf) -> StoredLeaf:
        names = [piece.name for piece in leaf.pieces]
        tensors = {name: checkpoint.adjust(name, files.view(name)) for name in names}
        return StoredLeaf(leaf, tensors, files.check_part)

    # Leaf by leaf, each released before the next: a base may fill most of the memory of host and
    # device.
    with _progress(checkpoint.leaves, dtype, place or place_as(dtype)) as counted:
        params = {leaf.path: counted(leaf.path, stored(leaf)) for leaf in checkpoint.leaves}
    return BaseModel(checkpoint.config, unflatten_dict(params), directory, source)


@contextlib.contextmanager
def _progress(leaves: Sequence[Leaf], dtype: jnp.dtype, place: Place) -> Iterator[Place]:
    """Make a placement that shows how many GB are placed, of all processes together."""
    sizes = {leaf.path: math.prod(leaf.shape) * jnp.dtype(dtype).itemsize for leaf in leaves}
    whole, done = sum(sizes.values()), 0
    # A small base is there before a bar is.
    if whole < _SHOWN_FROM or not is_primary():
        yield place
        return

    with progress_bar(len(sizes), "load", "tensor") as bar:

        def counted(path: tuple[str, ...], leaf: Any) -> Array:
            nonlocal done
            placed = place(path, leaf)
            done += sizes[path]
            bar.show(f"{done / 1e9:.1f} of {whole / 1e9:.1f} GB")
            bar.update()
            return placed

        yield counted


class StoredMatrix:
    """A [V, D] matrix of a checkpoint whose rows are read when they are asked for.

    Example: `matrix[0:4096]` is an array of 4096 rows; no more of it is in memory.
    """

    def __init__(self, shape: tuple[int, ...], read: Callable[[slice], np.ndarray]):
        self.shape = shape
        self._read = read

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return the rows of a slice without a step."""
        # safetensors refuses a slice that ends beyond its tensor.
        start, stop, _ = rows.indices(self.shape[0])
        return self._read(slice(start, stop))


def open_base(source: str) -> BaseModel:
    """Return a base whose params are shapes, but for its embedding and its output matrix.

    Those two are a `StoredMatrix` each, which is enough for a fingerprint and for the copies in
    others' layouts. Raises UserError as `load_base` does, except that a tokenizer is looked at only
    when the fingerprint is taken.
    """
    if is_shape(source):
        return random_base(source, FLOAT32, None)
    directory = find_directory(source)
    checkpoint = read_checkpoint(directory)
    files = _open_files(directory, checkpoint)

    def stored_matrix(leaf: Leaf) -> StoredMatrix:
        name = leaf.pieces[0].name

        # A family's adjustment of a matrix works row by row.
        return StoredMatrix(
            leaf.shape, lambda rows: checkpoint.adjust(name, files.read(name, rows))
        )

    # The first key is enough: embedding and lm_head lie at the root of the params.
    leaves = {leaf.path[0]: leaf for leaf in checkpoint.leaves}
    matrices = {name: leaves[name] for name in ("embedding", "lm_head") if name in leaves}
    # For the rest shapes are enough: heads are checked against them.
    params = base_shapes(checkpoint.config)
    params |= {name: stored_matrix(leaf) for name, leaf in matrices.items()}
    return BaseModel(checkpoint.config, params, directory, source)


def _open_files(directory: Path, checkpoint: Checkpoint) -> TensorFiles:
    files = checkpoint.family.files(directory)
    files.check(stored_shapes(checkpoint.leaves), harmless=checkpoint.is_harmless)
    return files


def describe_base(source: str) -> BaseModel:
    """Return a base that has no params yet; raises as `load_base` does."""
    if is_shape(source):
        return BaseModel(shape_config(source), {}, Path(source), source)
    directory = find_directory(source)
    return BaseModel(read_base_config(directory), {}, directory, source)


def place_as(dtype: jnp.dtype) -> Place:
    """Return the plain placement: cast to `dtype`, on the default device."""

    def place(path: tuple[str, ...], leaf: Any) -> Array:
        return jnp.array(leaf[...], dtype)  # a copy: an alias of host memory could not be donated

    return place


def _check_tokenizer(directory: Path, config: BaseConfig) -> None:
    # A token without an embedding would fail later, and only when a text has it.
    largest = max(_vocabulary(directory).items(), key=lambda item: item[1], default=("", -1))
    if largest[1] >= config.vocab_size:
        raise UserError(
            f"{directory}: token {largest[0]!r} of its tokenizer has id {largest[1]}, but the "
            f"embedding has only {config.vocab_size} rows; the tokenizer belongs to another model"
        )


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return token -> id, empty for a folder without a tokenizer: prompts can be given as ids.

    Without added tokens: Gemma 3's of 1B has the one for images, for which that base has no row. A
    row of prompts that names such a token is refused when it is read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            return {}
        added = tokenizer.get_added_vocab()
        return {token: id_ for token, id_ in tokenizer.get_vocab().items() if token not in added}
    # Faster than load_tokenizer, which imports transformers.
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a readable tokenizer: {error}") from error
