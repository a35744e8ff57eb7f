"""Draft heads on disk, native or third-party: opened and checked, loaded, and written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import save_file

from clover_jax.array_types import FLOAT32, LeafPath, Params
from clover_jax.checkpoints import mtp
from clover_jax.checkpoints.base import BaseModel, described_differences, fingerprint
from clover_jax.checkpoints.card import (
    CARD,
    PARAMS,
    Card,
    check_params,
    native_directory,
    read_card,
    read_leaf,
)
from clover_jax.checkpoints.config_json import read_config
from clover_jax.checkpoints.layout import Layout, tell_unread
from clover_jax.checkpoints.layouts import NATIVE, recognize
from clover_jax.checkpoints.loading import place_as
from clover_jax.checkpoints.quantized_config import read_quantization
from clover_jax.checkpoints.sources import find_directory, found_below
from clover_jax.checkpoints.tensor_files import TensorFiles, check_finite
from clover_jax.checkpoints.tensor_map import fuse, stored_shapes
from clover_jax.config import DrafterConfig
from clover_jax.drafters import registry
from clover_jax.errors import UserError, reason_of
from clover_jax.models.int8 import Int8Matrix, widen
from clover_jax.runtime.files import atomic_directory

_CHECKED_ROWS = 4096  # rows of a copy of a base's matrix that are compared at a time
_MATRIX_NAMES = {"lm_head": "output matrix", "embedding": "input embedding"}


@dataclasses.dataclass(frozen=True)
class StoredHead:
    """A head of which everything but its values was checked, in the folder `place`.

    card: its draft.json, or an equivalent one for a third-party layout.
    layout: "orbax", or the name of the layout in which it was found.
    shapes, dtypes: of each leaf by its path, of each stored tensor by its name.
    read: returns a leaf as it is stored; raises UserError naming one that is not finite.
    """

    source: str
    place: Path
    card: Card
    layout: str
    shapes: Mapping[LeafPath, tuple[int, ...]]
    dtypes: Mapping[str, np.dtype]
    read: Callable[[LeafPath], np.ndarray]

    @property
    def config(self) -> DrafterConfig:
        return self.card.config

    @property
    def dtype(self) -> np.dtype:
        """The type of all tensors; raises UserError where they differ: one would lose values."""
        (first, wanted), *others = self.dtypes.items()
        for name, dtype in others:
            if dtype != wanted:
                raise UserError(
                    f"{self.place}: tensor {name} is stored as {dtype}, {first} as {wanted}; "
                    "save all tensors of a head in one type"
                )
        return np.dtype(wanted)


def find_head(source: str, rope_theta: float | None) -> tuple[Path, Layout | None]:
    """Return a head's folder and its layout, None for a native one; arguments as in `load_draft`.

    Raises UserError without a head, or if `rope_theta` is given for a native head.
    """
    if source == mtp.NAME:
        return Path(), mtp.LAYOUT
    directory = find_directory(source)
    native = native_directory(directory)
    if native is None:
        if not (directory / "config.json").is_file():
            raise UserError(
                f"{directory} is not a draft: it has neither {CARD} (a draft directory), nor "
                f"best/{CARD} or draft/{CARD} (a training workdir), nor config.json (third-party "
                f"layouts){found_below(directory, (CARD, 'config.json'))}"
            )
        return directory, recognize(directory)

    # A native head was trained with the rotary base in its config.
    if rope_theta is not None:
        raise UserError(
            f"{native} stores its own RoPE theta; another one ({rope_theta:g}) can be given for "
            "third-party layouts only"
        )
    return native, None


def open_head(
    source: str,
    base: BaseModel,
    *,
    rope_theta: float | None = None,
    allow_base_mismatch: bool = False,
    cut_vocab: bool = False,
) -> StoredHead:
    """Find a head and check everything but its values; raises and takes arguments as `load_draft`.

    cut_vocab: leave out the rows by which a third-party head's vocabulary exceeds the base's.
    """
    directory, layout = find_head(source, rope_theta)
    if layout is None:
        return _open_native(directory, source, base, allow_base_mismatch)
    if source == mtp.NAME:
        directory = base.directory
    if layout is mtp.LAYOUT:
        layout = mtp.layout_in(directory)

    # The config determines which tensors to expect, with the vocabulary as it is stored.
    path = directory / "config.json"
    values = read_config(path)
    # A head that lies in the base's folder may be quantized as the base is, whose config was read.
    is_own = source == mtp.NAME
    quantization = read_quantization(values, path) if is_own else None
    stored = layout.parse_config(values, path, base.config)
    if not is_own:
        tell_unread(values, path, layout)
    # Some heads were trained with another rotary base than the one in their config.
    if rope_theta:
        rope = dataclasses.replace(stored.layer.rope, theta=rope_theta)
        layer = dataclasses.replace(stored.layer, rope=rope)
        stored = dataclasses.replace(stored, layer=layer)
    # Rows are cut only when asked: a longer vocabulary may be another base's.
    config, wanted = stored, base.config.vocab_size
    excess = stored.vocab_size - wanted
    if excess > 0 and not cut_vocab:
        raise UserError(
            f"{directory}: the head's vocab_size is {stored.vocab_size}, but the base "
            f"{base.source} has {wanted}; give the base that the head was trained for or, where "
            f"the last {excess} rows are padding, --cut_vocab of clover_jax.convert"
        )
    if excess > 0:
        try:
            config = dataclasses.replace(stored, vocab_size=wanted)
        except ValueError as error:  # ids of its draft vocabulary lie in the rows to cut
            raise UserError(f"{directory}, without its last {excess} rows: {error}") from error
    # The head must treat embeddings and logits as the base does.
    config = registry.of_base(config, base.config)
    _check_widths(config, base, str(directory))

    # Every stored tensor must be accounted for.
    files = TensorFiles(directory, quantization)
    own = stored_shapes(layout.leaves(stored))
    copies = dict.fromkeys(layout.copies, (stored.vocab_size, stored.layer.hidden_size))
    further = {name: array.shape for name, array in layout.more_tensors(stored).items()}
    files.check(
        own | copies | further,
        # The base's own tensors lie next to such a head.
        harmless=lambda name: name in layout.optional or directory == base.directory,
    )
    # Types of the head's own tensors only: copies and tables of ids may have others.
    dtypes = {name: files.dtype(name) for name in own}

    # The copies of the base's matrices show whose head it is.
    if not allow_base_mismatch:
        for name, which in layout.copies.items():
            _check_copy(files, name, which, base)

    # Only the rows of the base's vocabulary are read, not the padding.
    leaves = {leaf.path: leaf for leaf in layout.leaves(config)}
    kept = stored_shapes(leaves.values())

    def read(path: LeafPath) -> np.ndarray:
        leaf = leaves[path]
        params = fuse(leaf, lambda name: files.view(name)[: kept[name][0]])
        if any(offset := layout.offset(piece.name) for piece in leaf.pieces):
            params = params.astype(np.float32) + np.float32(offset)
        files.check_part([piece.name for piece in leaf.pieces], params)
        return params

    # The layout does not name the base, so the user's is recorded.
    card = Card(config, fingerprint(base), None, {"layout": layout.name})
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    return StoredHead(source, directory, card, layout.name, shapes, dtypes, read)


def _open_native(
    directory: Path, source: str, base: BaseModel, allow_base_mismatch: bool
) -> StoredHead:
    card = read_card(directory)
    # Another width cannot be decoded with, even with --allow_base_mismatch.
    _check_widths(card.config, base, f"draft {source}")
    if not allow_base_mismatch:
        differing = described_differences(card.base, fingerprint(base))
        if differing:
            raise UserError(
                f"draft {source} was trained for another base than {base.source}: {differing}; "
                "give the base that it was trained for, or --allow_base_mismatch"
            )

    # Only shapes are compared, so float32 stands for any type. A base opened for conversion has
    # matrices that are not arrays, but they have shapes.
    shapes_of_base = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
        base.params,
        is_leaf=lambda leaf: isinstance(leaf, Int8Matrix),
    )
    # An edited config can have values of any type, which fail anywhere in a head's code.
    try:
        expected = registry.init_shapes(registry.head(card.config), shapes_of_base)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{directory / CARD}: no head can be built from its drafter ({reason_of(error)}); was "
            "it edited?"
        ) from error
    # Every base has pre_norm and post_norm; the other features are named by a layer.
    named = [name for name in card.config.features if name.startswith("layer_")]
    deepest = max((int(name.removeprefix("layer_")) for name in named), default=0)
    if deepest >= base.config.num_layers:
        raise UserError(
            f"draft {source} reads the state that enters layer {deepest}, but base {base.source} "
            f"has {base.config.num_layers} layers; give the base that it was trained for"
        )

    # The checks above need the config alone, so they come before any tensor.
    folder = directory / PARAMS
    stored = check_params(folder, expected, card.files)
    shapes = {path: tuple(leaf.shape) for path, leaf in stored.items()}
    dtypes = {"/".join(path): np.dtype(leaf.dtype) for path, leaf in stored.items()}

    def read(path: LeafPath) -> np.ndarray:
        leaf = read_leaf(folder, path)
        check_finite(leaf, "/".join(path), folder)
        return leaf

    return StoredHead(source, folder, card, NATIVE, shapes, dtypes, read)


def _check_widths(config: DrafterConfig, base: BaseModel, where: str) -> None:
    pairs = {
        "vocab_size": (config.vocab_size, base.config.vocab_size),
        "hidden_size": (config.layer.hidden_size, base.config.hidden_size),
    }
    for name, (own, wanted) in pairs.items():
        if own != wanted:
            raise UserError(
                f"{where}: the head's {name} is {own}, but the base {base.source} has {wanted}; "
                "give the base that the head was trained for"
            )


def _check_copy(files: TensorFiles, name: str, which: str, base: BaseModel) -> None:
    # Some rows at a time: the matrix may be the largest of the base.
    matrix = base.lm_head if which == "lm_head" else base.params["embedding"]
    for start in range(0, matrix.shape[0], _CHECKED_ROWS):
        rows = matrix[start : start + _CHECKED_ROWS]
        expected = np.asarray(widen(rows, FLOAT32)).astype(np.float32)
        stored = files.read(name, slice(start, start + len(expected))).astype(np.float32)

        # To a bfloat16 rounding, as the head may be stored in another dtype than the base, and to
        # half a step where the base is quantized.
        half = 0.5 * np.asarray(rows.step) if isinstance(rows, Int8Matrix) else 0.0
        differs = np.abs(stored - expected) > 2.0**-7 * np.abs(expected) + half + 1e-6
        if differs.any():
            row = start + int(np.argmax(differs.any(axis=1)))
            raise UserError(
                f"{files.directory}: {name} differs from the {_MATRIX_NAMES[which]} of the base "
                f"{base.source} (first in row {row}); give the base that the head was trained for"
            )


@dataclasses.dataclass(frozen=True)
class Draft:
    """A loaded draft: its module and config, params, its card's fields, the user's name for it."""

    head: registry.DraftHead
    # Not in the repr: an error message with all arrays in it cannot be read.
    params: Params = dataclasses.field(repr=False)
    tree: str | None
    provenance: dict[str, Any]
    source: str
    chat_template: str | None = None


def load_draft(
    source: str | Path,
    base: BaseModel,
    dtype: jnp.dtype = FLOAT32,
    *,
    allow_base_mismatch: bool = False,
    rope_theta: float | None = None,
) -> Draft:
    """Load a draft for a base.

    source: a native draft directory, a training workdir (its best/, else its draft/), or a folder
        or hub id in a third-party layout, recognized by its config.json and tensor names.
    allow_base_mismatch: use it even if it was trained for another base of the same widths.
    rope_theta: rotary base for a third-party layout that does not store it.
    Raises UserError naming the part that is missing, broken or does not fit.
    """
    head = open_head(
        str(source), base, rope_theta=rope_theta, allow_base_mismatch=allow_base_mismatch
    )
    return read_draft(head, dtype)


def read_draft(head: StoredHead, dtype: jnp.dtype) -> Draft:
    """Read the params of an opened head, cast to `dtype`, on the default device."""
    # Leaf by leaf, so that the host holds one at a time.
    card, place = head.card, place_as(dtype)
    params = unflatten_dict({path: place(path, head.read(path)) for path in head.shapes})
    built = registry.head(card.config)
    return Draft(built, params, card.tree, card.provenance, head.source, card.chat_template)


def write_foreign(directory: Path, head: StoredHead, layout: Layout, base: BaseModel) -> None:
    """Write a head in a third-party layout; raises UserError where that cannot hold it."""
    # Refused before the folder is created.
    layout.check_exportable(head.config, base.config)
    if layout is mtp.LAYOUT:
        layout = mtp.layout_in(base.directory)
    dtype = head.dtype
    tensors: dict[str, np.ndarray] = {}
    for leaf in layout.leaves(head.config):
        params = head.read(leaf.path)
        for piece in leaf.pieces:
            values = piece.unpermuted(params)
            if offset := layout.offset(piece.name):
                values = values.astype(np.float32) - np.float32(offset)
            # Several pieces may share a tensor.
            part = tensors.setdefault(piece.name, np.empty(piece.shape, dtype))[piece.part]
            part[...] = values.reshape(part.shape)
    # Copies of the base's matrices are cast to the head's type.
    matrices = {"lm_head": base.lm_head, "embedding": base.params["embedding"]}
    for name, which in layout.copies.items():
        tensors[name] = np.asarray(matrices[which][: head.config.vocab_size]).astype(dtype)
    # Further weights have the head's type as well; ids and masks keep theirs.
    for name, value in layout.more_tensors(head.config).items():
        tensors[name] = value.astype(dtype) if value.dtype.kind == "f" else value

    # Servers run a head in the type named by `torch_dtype`, or in float16 without it.
    fields = layout.config_fields(head.config, base) | {"torch_dtype": str(dtype)}
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with atomic_directory(directory) as unfinished:
        save_file(contiguous, unfinished / layout.file, metadata={"format": "pt"})
        text = json.dumps(fields, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
