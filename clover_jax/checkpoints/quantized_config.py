"""How a folder's weights are quantized: its config read, and its tensors joined to matrices.

A matrix is quantized where its tensors say so, so which modules a config leaves out need not be
known. Activations are never quantized, whatever a config says of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from clover_jax.checkpoints.gguf_file import TABLE, GgufTensors, gguf_tensors
from clover_jax.checkpoints.quantized_formats import (
    PACKINGS,
    Packing,
    QuantizedMatrix,
    Sizes,
    Stored,
)
from clover_jax.checkpoints.tensor_map import LazyTensor
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

# Tensors that only quantized activations and caches need.
_OF_ACTIVATIONS = re.compile(
    r".*\.((input|output|activation|[qkv])_(scale|zero_point)|input_global_scale)"
)


T = TypeVar("T", bound=Stored)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the matrices of a folder are stored, as its config says."""

    method: str
    sizes: Sizes

    def join(self, tensors: Mapping[str, T]) -> dict[str, T | QuantizedMatrix]:
        """Return tensors by name in which the parts of each quantized matrix are one.

        Raises UserError for parts that do not fit together.
        """
        joined: dict[str, T | QuantizedMatrix] = {
            name: tensor for name, tensor in tensors.items() if not _OF_ACTIVATIONS.fullmatch(name)
        }
        if len(joined) < len(tensors):
            skipped = sorted(tensors.keys() - joined.keys())
            say(
                f"{len(skipped)} tensors that only quantized activations need are not read, such "
                f"as {skipped[0]}"
            )
        # More special packings come first: their parts are gone when others are looked for.
        for packing in PACKINGS[self.method]:
            for marked in [name for name in joined if name.endswith(packing.parts[0])]:
                stem = marked.removesuffix(packing.parts[0])
                ends = [e for e in packing.parts + packing.optional if stem + e in joined]
                # Where a part is missing, the others stay, and no config asks for them.
                if set(packing.parts) <= set(ends):
                    parts = {end: tensors[stem + end] for end in ends}
                    for end in ends:
                        del joined[stem + end]
                    joined[stem + packing.end] = self._matrix(stem, packing, parts)
        return joined

    def _matrix(self, stem: str, packing: Packing, parts: Mapping[str, Stored]) -> QuantizedMatrix:
        def view() -> LazyTensor:
            return packing.open({end: part.view() for end, part in parts.items()}, self.sizes)

        path = parts[packing.parts[0]].path
        try:
            # Opened for its shape and checks. The views are dropped: they would keep files mapped.
            return QuantizedMatrix(path, view().shape, view)
        except UserError as error:
            shapes = ", ".join(f"{stem}{end} {part.shape}" for end, part in parts.items())
            raise UserError(f"{path}: {error}; the tensors are {shapes}") from error


def read_quantization(values: dict[str, Any], path: Path) -> Quantization | GgufTensors | None:
    """Take `quantization_config` out of a config; return None where weights are not quantized.

    values: of config.json, where the object may be, or be within `text_config`.
    Raises UserError for a method or a variant that is not read.
    """
    inner = values.get("text_config")
    objects = [values, inner] if isinstance(inner, dict) else [values]
    # Both may have it, and then the same.
    found = [each.pop("quantization_config", None) for each in objects]
    fields: dict[str, Any] = next(filter(None, found), {})
    if not fields:
        return None
    method, needed = fields.get("quant_method"), {"quant_method"}
    if method == "gguf" and (path.parent / TABLE).is_file():
        return gguf_tensors(values, fields["architecture"], path.parent)
    if method not in PACKINGS:
        raise UserError(
            f"{path}: weights quantized with {method!r} are not supported, only "
            f"{', '.join(PACKINGS)}; use an unquantized checkpoint"
        )

    # Fields with one value that is read, in any case of letters.
    for name, allowed in _VARIANTS.get(method, {}).items():
        needed.add(name)
        _check_variant(fields.get(name), name, allowed, path)
    sizes = Sizes()
    if method == "fp8":
        needed.add("weight_block_size")
        rows, columns = _block(fields, "weight_block_size", path)
        sizes = Sizes(rows=_positive(rows), columns=_positive(columns))
    elif method == "gptq":
        # The first version stores zero points less 1.
        sizes = Sizes(zero_offset=int(fields.get("checkpoint_format") != "gptq_v2"))
    elif method == "awq":
        needed.add("group_size")
        sizes = Sizes(columns=_positive(fields.get("group_size")))
    elif method == "modelopt":
        needed |= {"quantized_layers", "group_size"}
        sizes = _sizes_of_layers(fields, path)
    elif method == "compressed-tensors":
        needed.add("config_groups")
        sizes = _sizes_of_groups(fields, path)

    unread = sorted(fields.keys() - needed)
    needless = f"; not needed of quantization_config: {', '.join(unread)}" if unread else ""
    say(f"{path}: weights in {method} are dequantized as they are read{needless}")
    return Quantization(method, sizes)


# ModelOpt's ways to store a matrix, and its name for a mixture of them.
_BY_BLOCKS = ("fp8_pb_wo", "fp8_block_scales")
_MODELOPT = ("fp8", "fp8_per_channel_per_token", *_BY_BLOCKS, "nvfp4", "w4a16_nvfp4")
_MIXED = "mixed_precision"
# Of each method the fields that could name what is not read, with what is; null is, too.
_VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3",)},
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2"), "is_marlin_format": (False,)},
    "awq": {"version": ("gemm",), "format": ("gemm",), "bits": (4,)},
    "modelopt": {"quant_algo": (*_MODELOPT, _MIXED)},
    "compressed-tensors": {
        "format": (*("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),)
        + ("nvfp4-pack-quantized", "mixed-precision", "dense"),
        # Rotations that activations need too, and matrices without their zeros.
        "transform_config": ({},),
        "sparsity_config": ({}, {"format": "dense"}),
    },
}


def _check_variant(value: Any, name: str, allowed: tuple[Any, ...], path: Path) -> None:
    plain = value.lower() if isinstance(value, str) else value
    if value is not None and plain not in allowed:
        raise UserError(
            f"{path}: {name} {value!r:.60} of quantization_config is not supported, only "
            f"{', '.join(map(str, allowed))}; use an unquantized checkpoint"
        )


def _sizes_of_layers(fields: Mapping[str, Any], path: Path) -> Sizes:
    """Return what occurs in any of ModelOpt's modules, each of which has a way in a mixture."""
    layers: Any = {"": fields}
    if str(fields.get("quant_algo")).lower() == _MIXED:
        layers = fields.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(x, dict) for x in layers.values()):
            raise UserError(
                f"{path}: {_MIXED} needs quantized_layers, an object with the quant_algo of each "
                f"module, not {layers!r:.60}"
            )
        for name, layer in layers.items():
            _check_variant(layer.get("quant_algo", ""), f"quant_algo of {name}", _MODELOPT, path)

    # As with groups, names and types of tensors tell how each matrix is stored.
    rows: set[int] = set()
    columns: set[int] = set()
    for layer in layers.values():
        size = _positive(layer.get("group_size"))
        if str(layer.get("quant_algo")).lower() in _BY_BLOCKS:
            size = size or (128,)
            rows.update(size)
        columns.update(size)
    return Sizes(rows=tuple(rows), columns=tuple(columns))


def _sizes_of_groups(fields: Mapping[str, Any], path: Path) -> Sizes:
    """Return what occurs in any of compressed-tensors' groups of modules."""
    bits: set[int] = set()
    rows: set[int] = set()
    columns: set[int] = set()
    groups = fields.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else [groups]

    # Which group a module is in need not be known: sizes and names of tensors tell.
    for group in groups:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UserError(f"{path}: config_groups must say how weights are stored, not {group!r}")
        formats = _VARIANTS["compressed-tensors"]["format"]
        _check_variant(group.get("format"), "format", formats, path)
        block = _block(weights, "block_structure", path)
        bits.update(_positive(weights.get("num_bits")))
        rows.update(_positive(block[0]))
        columns.update(_positive(block[1]) + _positive(weights.get("group_size")))
    return Sizes(tuple(bits), tuple(rows), tuple(columns))


def _block(fields: Mapping[str, Any], name: str, path: Path) -> tuple[Any, Any]:
    """Return the rows and columns that share a scale; zeros where the field is not there."""
    block = fields.get(name) or (0, 0)
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise UserError(f"{path}: {name} must be two numbers, rows and columns, not {block!r}")
    return block[0], block[1]


def _positive(value: Any) -> tuple[int, ...]:
    """Return the number in a tuple, or none for what stands for all of a row."""
    return (value,) if type(value) is int and value > 0 else ()
