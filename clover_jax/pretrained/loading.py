"""Load a base model: find its folder, read its config, place its tensors one by one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from clover_jax.array_types import Array
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.families import read_checkpoint
from clover_jax.pretrained.shapes import is_shape, random_base, shape_config
from clover_jax.pretrained.sources import find_directory
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Place, assemble, stored_shapes
from clover_jax.tokenizers.tokenizer import load_tokenizer


def load_base(source: str, dtype: jnp.dtype = jnp.float32, place: Place | None = None) -> BaseModel:
    """Load the frozen base.

    source: a Hugging Face folder, a hub id (`owner/name`, `owner/name@revision`), "builtin:tiny",
        or "shape:NAME" for random weights (see models/shapes.py).
    dtype: of the params.
    place: puts each finished tensor on its device or shards, `place(path, array) -> jax.Array`;
        by default it is cast to `dtype` on the default device.
    Raises UserError for anything missing, broken or unsupported, naming it.
    """
    if is_shape(source):
        return random_base(source, dtype, place)
    directory = find_directory(source)
    checkpoint = read_checkpoint(directory)
    config = checkpoint.config
    _check_tokenizer(directory, config)
    files = TensorFiles(directory)
    files.check(stored_shapes(checkpoint.leaves), harmless=checkpoint.is_harmless)

    def read(name: str) -> np.ndarray:
        return checkpoint.adjust(name, files.read(name))

    params = assemble(checkpoint.leaves, read, place or place_as(dtype))
    return BaseModel(config=config, params=params, directory=directory, source=source)


class BaseDescription(NamedTuple):
    """A base without its weights. directory: where its tokenizer is, if it has one."""

    config: BaseConfig
    directory: Path


def describe_base(source: str) -> BaseDescription:
    """Return what is known of a base before its weights are read; raises as `load_base` does."""
    if is_shape(source):
        return BaseDescription(shape_config(source), Path(source))
    directory = find_directory(source)
    return BaseDescription(read_checkpoint(directory).config, directory)


def place_as(dtype: jnp.dtype) -> Place:
    """Return the plain placement: cast to `dtype`, on the default device."""

    def place(path: tuple[str, ...], array: np.ndarray) -> Array:
        return jnp.array(array, dtype)  # a copy: an alias of host memory could not be donated

    return place


def _check_tokenizer(directory: Path, config: BaseConfig) -> None:
    largest = max(_vocabulary(directory).items(), key=lambda item: item[1], default=("", -1))
    if largest[1] >= config.vocab_size:
        raise UserError(
            f"{directory}: token {largest[0]!r} of its tokenizer has id {largest[1]}, but the "
            f"embedding has only {config.vocab_size} rows; the tokenizer belongs to another model"
        )


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return token -> id, empty for a folder without a tokenizer: prompts can be given as ids."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        tokenizer = load_tokenizer(directory)
        return {} if tokenizer is None else tokenizer.get_vocab()
    # Much faster than load_tokenizer, which imports transformers.
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a readable tokenizer: {error}") from error
