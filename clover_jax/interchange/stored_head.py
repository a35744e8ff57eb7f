"""A draft head on disk, in whatever layout, whose params are read leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from clover_jax.config import DrafterConfig
from clover_jax.errors import UserError
from clover_jax.interchange.base_copies import MATRIX_NAMES, check_copy, check_widths
from clover_jax.interchange.directory import (
    PARAMS,
    Card,
    check_base,
    expected_params,
    find_head,
    read_card,
)
from clover_jax.interchange.layout import Layout
from clover_jax.interchange.layouts import LAYOUTS, NATIVE
from clover_jax.interchange.params_folder import check_folder
from clover_jax.interchange.params_stream import read_leaf
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.fingerprint import fingerprint
from clover_jax.pretrained.finite import check_finite
from clover_jax.pretrained.shapes import base_shapes
from clover_jax.pretrained.stored_base import StoredMatrix
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.pretrained.tensor_map import Path as LeafPath
from clover_jax.pretrained.tensor_map import fuse, stored_shapes


@dataclasses.dataclass(frozen=True)
class StoredHead:
    """A head that was checked by everything but its values.

    card: its draft.json; for a foreign layout what that would say.
    layout: "orbax", or the name of the layout that it was found in.
    shapes: path of a leaf -> its shape. dtype: of every leaf.
    read: returns a leaf as it is stored; raises UserError naming one that is not finite.
    """

    card: Card
    layout: str
    shapes: dict[LeafPath, tuple[int, ...]]
    dtype: np.dtype
    read: Callable[[LeafPath], np.ndarray]

    @property
    def config(self) -> DrafterConfig:
        """The head's config."""
        return self.card.config


def open_head(
    source: str,
    base: BaseModel,
    rope_theta: float | None = None,
    allow_base_mismatch: bool = False,
    cut_vocab: bool = False,
) -> StoredHead:
    """Find a head and check all of it but the values; the arguments are those of `load_draft`.

    cut_vocab: leave out the rows by which a foreign head's vocabulary is longer than the base's.
    Raises UserError naming whatever is missing, broken or does not fit.
    """
    directory, name = find_head(source, rope_theta)
    if name is None:
        return _open_native(directory, source, base, allow_base_mismatch)
    layout = LAYOUTS[name]
    config = layout.read_config(directory, rope_theta, base.config)
    fitted = _fit_vocabulary(config, base, directory, cut_vocab)
    check_widths(fitted, base, directory)
    return _open_foreign(directory, layout, config, fitted, base, allow_base_mismatch)


def _open_native(
    directory: Path, source: str, base: BaseModel, allow_base_mismatch: bool
) -> StoredHead:
    card = read_card(directory)
    check_base(card, base, source, allow_base_mismatch)
    expected = expected_params(card, directory, base_shapes(base.config))
    folder = directory / PARAMS
    tree = check_folder(folder, expected, card.files)
    stored = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    dtype = _one_dtype({"/".join(path): leaf.dtype for path, leaf in stored.items()}, folder)

    def read(path: LeafPath) -> np.ndarray:
        leaf = read_leaf(folder, path)
        check_finite(leaf, "/".join(path), folder)
        return leaf

    shapes = {path: tuple(leaf.shape) for path, leaf in stored.items()}
    return StoredHead(card, NATIVE, shapes, dtype, read)


def _fit_vocabulary(
    config: DrafterConfig, base: BaseModel, directory: Path, cut_vocab: bool
) -> DrafterConfig:
    """Return the config with the base's vocabulary where the head's is padded."""
    ours, wanted = config.vocab_size, base.config.vocab_size
    if ours <= wanted:
        return config
    if not cut_vocab:
        raise UserError(
            f"{directory}: the head's vocab_size is {ours}, that of the base {base.source} is "
            f"{wanted}; give the base that the head was trained for or, where the last "
            f"{ours - wanted} rows are padding, --cut_vocab"
        )
    try:
        return dataclasses.replace(config, vocab_size=wanted)
    except ValueError as error:  # ids of its draft vocabulary lie in what would be cut
        raise UserError(f"{directory}, without its last {ours - wanted} rows: {error}") from error


def _open_foreign(
    directory: Path,
    layout: Layout,
    stored_config: DrafterConfig,
    config: DrafterConfig,
    base: BaseModel,
    allow_base_mismatch: bool,
) -> StoredHead:
    """Open a head in a layout of others.

    stored_config: as the folder says it. config: the same with the base's vocabulary.
    """
    files = TensorFiles(directory)
    own = stored_shapes(layout.leaves(stored_config))
    width = config.layer.hidden_size
    copies = dict.fromkeys(layout.copies, (stored_config.vocab_size, width))
    further = {name: x.shape for name, x in layout.more_tensors(stored_config).items()}
    files.check(own | copies | further)
    leaves = {leaf.path: leaf for leaf in layout.leaves(config)}
    kept = stored_shapes(leaves.values())
    dtype = _one_dtype({name: files.dtype(name) for name in own}, directory)
    for name, matrix in () if allow_base_mismatch else layout.copies.items():
        _check_copy(files, name, matrix, base, directory)

    def read_tensor(name: str) -> np.ndarray:
        if kept[name] == own[name]:
            return files.read(name)
        return files.read_rows(name, 0, kept[name][0])

    def read(path: LeafPath) -> np.ndarray:
        return fuse(leaves[path], read_tensor)

    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    provenance = {"layout": layout.name}
    card = Card(config, fingerprint(base), None, provenance)
    return StoredHead(card, layout.name, shapes, dtype, read)


def _check_copy(
    files: TensorFiles, name: str, matrix: str, base: BaseModel, directory: Path
) -> None:
    ours = base.lm_head if matrix == "lm_head" else base.params["embedding"]
    stored = StoredMatrix(tuple(ours.shape), lambda start, stop: files.read_rows(name, start, stop))
    check_copy(name, stored, ours, MATRIX_NAMES[matrix], base, directory)


def _one_dtype(dtypes: dict[str, np.dtype], place: Path) -> np.dtype:
    """Return the type of all tensors.

    Raises UserError naming the first that has another: no one type would keep all values.
    """
    (first, wanted), *others = dtypes.items()
    for name, dtype in others:
        if dtype != wanted:
            raise UserError(
                f"{place}: tensor {name} is stored as {dtype}, {first} as {wanted}; "
                "save all tensors of a head in one type"
            )
    return np.dtype(wanted)
