"""Dequantize weights as others store them: FP8, compressed-tensors, GPTQ, AWQ, NVFP4, MXFP4.

A quantized matrix is several stored tensors: codes of a few bits, and a scale for each group of
them, often with a zero point. Each format opens its tensors as one matrix, computed as far as it is
read, in float32. `quantized_config.py` says which format a folder has.

Sources: the library that writes each format (compressed-tensors, AutoGPTQ, AutoAWQ, ModelOpt), and
for MXFP4 the OCP Microscaling formats, version 1.0, as gpt-oss is published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from clover_jax.checkpoints.tensor_map import Box, LazyTensor
from clover_jax.errors import UserError

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])  # the highest of four bits is the sign
SCALE_BIAS = 127  # a stored scale e of MXFP4 stands for 2^(e - 127)
# AWQ packs eight columns in a word: the place of each among its eight numbers of four bits.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


class Sizes(NamedTuple):
    """What a config says of codes and groups; for a mixture all that occur.

    rows, columns: that share a scale. zero_offset: what is added to stored zero points.
    """

    bits: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    zero_offset: int = 0


class Stored(Protocol):
    """What is needed of a `tensor_files.StoredTensor`."""

    @property
    def path(self) -> Path: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def view(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix that several stored tensors make up, in one of the files."""

    path: Path
    shape: tuple[int, ...]
    view: Callable[[], LazyTensor]


Parts = Mapping[str, np.ndarray]  # the tensors of one matrix, by the ends of their names
Open = Callable[[Parts, Sizes], LazyTensor]


class Packing(NamedTuple):
    """One way to store a matrix: `parts` and `optional` are the ends of its tensors' names.

    The first part tells a matrix that is stored so. `end` is what the matrix's own name ends with.
    """

    parts: tuple[str, ...]
    open: Open
    optional: tuple[str, ...] = ()
    end: str = ".weight"


def unpack(words: np.ndarray, bits: int, places: np.ndarray) -> np.ndarray:
    """Return numbers of a few bits from the last axis of words, the first in the lowest bits.

    Numbers may lie across words; `places` are their indices in the row of numbers, 0 first.

    Example: bits 4, words [[0x21, 0x43]], places [0, 3] give [[1, 4]].
    """
    # Each number lies in two neighboring bytes, of the words that hold any.
    at, size = bits * places, 8 * words.itemsize
    first, last = at.min() // size, (at.max() + bits - 1) // size + 1
    data = np.ascontiguousarray(words[..., first:last]).view(np.uint8).astype(np.uint16)
    data[..., :-1] |= data[..., 1:] << 8
    at -= size * first
    return (np.take(data, at // 8, axis=-1) >> (at % 8).astype(np.uint16)) & (2**bits - 1)


def scaled(
    codes: Callable[[slice, slice], np.ndarray],
    scale: np.ndarray,
    zero: np.ndarray | None,
    row_groups: np.ndarray,
    column_groups: np.ndarray,
) -> LazyTensor:
    """Return the matrix whose entry is (code - zero) * scale, in float32.

    codes: returns the codes of some rows and columns. scale, zero: [A, B], of groups of entries.
    row_groups, column_groups: which group each row and each column belongs to.
    """
    # Indices beyond the groups would be found only when that part is read.
    named = (int(row_groups.max()) + 1, int(column_groups.max()) + 1)
    if any(np.greater(named, scale.shape)) or column_groups.min() < 0:
        raise UserError(f"entries name {named} groups, and scales are {scale.shape}")
    if zero is not None and zero.shape != scale.shape:
        raise UserError(f"{zero.shape} zero points do not fit {scale.shape} scales")

    def over_columns(groups: np.ndarray, columns: slice) -> np.ndarray:
        return np.take(groups.astype(np.float32), column_groups[columns], axis=1)

    def read(box: Box) -> np.ndarray:
        rows, columns = box
        numbers = codes(rows, columns).astype(np.float32)
        if zero is not None:
            numbers -= over_columns(zero[row_groups[rows]], columns)
        numbers *= over_columns(scale[row_groups[rows]], columns)
        return numbers

    return LazyTensor((len(row_groups), len(column_groups)), read)


def _groups(size: int, count: int, blocks: Iterable[int]) -> np.ndarray:
    """Return which of `count` groups each of `size` rows or columns belongs to."""
    if count == 1:
        return np.zeros(size, int)
    # The last block may be smaller. Without a fitting one, all groups are of one size.
    fitting = [block for block in blocks if -(-size // block) == count]
    if not fitting and size % count:
        raise UserError(f"{size} rows or columns do not make {count} groups")
    return np.arange(size) // (fitting[0] if fitting else size // count)


def _by_blocks(shape: tuple[int, int], scale: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, ...]:
    """Return the groups of rows and of columns of a matrix with a grid of scales."""
    return (
        _groups(shape[0], scale.shape[0], sizes.rows),
        _groups(shape[1], scale.shape[1], sizes.columns),
    )


def _grid(groups: np.ndarray) -> np.ndarray:
    """Return scales or zero points as [A, B]: one for all, or one a row, may be stored flat.

    ModelOpt's of blocks are [A, 1, B, 1].
    """
    if groups.ndim == 4 and groups.shape[1::2] == (1, 1):
        return groups[:, 0, :, 0]
    return groups if groups.ndim == 2 else groups.reshape(-1, 1)


def _plain(parts: Parts, sizes: Sizes) -> LazyTensor:
    """Open FP8 or int8: each number by itself, scales by blocks, groups, rows, or one for all."""
    weight = parts[".weight"]
    scale = _grid(next(part for end, part in parts.items() if "_scale" in end))
    zero = parts.get(".weight_zero_point")
    if weight.dtype not in (np.int8, ml_dtypes.float8_e4m3fn) or weight.ndim != 2:
        raise UserError(f"a matrix in int8 or FP8 cannot be {weight.dtype} of shape {weight.shape}")
    # A table is three times as fast as the cast from FP8.
    table = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)

    def codes(rows: slice, columns: slice) -> np.ndarray:
        return table[weight[rows, columns].view(np.uint8)]

    zero = None if zero is None else _grid(zero)
    return scaled(codes, scale, zero, *_by_blocks(weight.shape, scale, sizes))


def _packed(parts: Parts, sizes: Sizes) -> LazyTensor:
    """Open compressed-tensors' packed integers: rows of words, zero points packed down columns."""
    words, scale = parts[".weight_packed"], _grid(parts[".weight_scale"])
    outputs, inputs = (int(size) for size in parts[".weight_shape"])
    fitting = [bits for bits in sizes.bits if -(-inputs * bits // 32) == words.shape[1]]
    if len(fitting) != 1 or len(words) != outputs:
        raise UserError(
            f"{outputs} x {inputs} integers of {sizes.bits} bits do not fit weight_packed's shape "
            f"{words.shape}"
        )
    bits = fitting[0]

    # Both are stored without a sign, half of the range above 0.
    half, places = 2 ** (bits - 1), np.arange(inputs)
    row_groups, column_groups = _by_blocks((outputs, inputs), scale, sizes)
    column_groups = parts.get(".weight_g_idx", column_groups)
    zero = np.full(scale.shape, half, np.uint16)
    if ".weight_zero_point" in parts:
        packed = parts[".weight_zero_point"].T
        if packed.shape[1] * 32 < scale.shape[0] * bits:
            raise UserError(
                f"weight_zero_point packs {packed.shape[1] * 32 // bits} rows, weight_scale has "
                f"{scale.shape[0]}"
            )
        zero = unpack(packed, bits, np.arange(scale.shape[0])).T

    def codes(rows: slice, columns: slice) -> np.ndarray:
        return unpack(words[rows], bits, places[columns])

    return scaled(codes, scale, zero, row_groups, column_groups)


def _gptq(parts: Parts, sizes: Sizes) -> LazyTensor:
    """Open GPTQ: words down the inputs, each of which names its group."""
    words, scale, groups = parts[".qweight"], parts[".scales"], parts[".g_idx"]
    inputs, outputs = len(groups), scale.shape[1]
    bits = 32 * len(words) // inputs
    if (
        bits not in range(1, 9)
        or -(-bits * inputs // 32) != len(words)
        or words.shape[1] != outputs
    ):
        raise UserError(f"words for {inputs} inputs and {outputs} outputs do not fit the scales")
    places, columns_of = np.arange(inputs), np.arange(outputs)
    zero = unpack(parts[".qzeros"], bits, columns_of) + np.uint16(sizes.zero_offset)

    def codes(rows: slice, columns: slice) -> np.ndarray:
        return unpack(words[:, rows].T, bits, places[columns])

    return scaled(codes, scale.T, zero.T, columns_of, groups)


def _awq(parts: Parts, sizes: Sizes) -> LazyTensor:
    """Open AWQ's packing for GEMM: words along the outputs, eight of which change places."""
    words, scale = parts[".qweight"], parts[".scales"]
    inputs, outputs = len(words), scale.shape[1]
    if words.shape[1] * 8 != outputs:
        raise UserError(f"words of 8 codes do not make {outputs} outputs")
    eights = np.arange(0, outputs, 8)[:, None]
    places = (eights + _AWQ_PLACES).reshape(-1)
    zero = unpack(parts[".qzeros"], 4, places)

    def codes(rows: slice, columns: slice) -> np.ndarray:
        return unpack(words[columns], 4, places[rows]).T

    groups = _groups(inputs, len(scale), sizes.columns)
    return scaled(codes, scale.T, zero.T, np.arange(outputs), groups)


def _nvfp4(parts: Parts, sizes: Sizes) -> LazyTensor:
    """Open NVFP4: two numbers a byte, an FP8 scale for sixteen of them, and one for all."""
    # compressed-tensors divides by the scale of all, ModelOpt multiplies with it.
    if ".weight_global_scale" in parts:
        words, whole = parts[".weight_packed"], 1 / parts[".weight_global_scale"].reshape(())
    else:
        words, whole = parts[".weight"], parts[".weight_scale_2"].reshape(())
    if words.dtype != np.uint8 or words.ndim != 2:
        raise UserError(f"a matrix in NVFP4 cannot be {words.dtype} of shape {words.shape}")
    scale = parts[".weight_scale"].astype(np.float32) * whole
    places = np.arange(2 * words.shape[1])

    def codes(rows: slice, columns: slice) -> np.ndarray:
        return FP4[unpack(words[rows], 4, places[columns])]

    return scaled(codes, scale, None, *_by_blocks((len(words), len(places)), scale, sizes))


def _mxfp4(parts: Parts, sizes: Sizes) -> LazyTensor:
    """Open MXFP4's [X, O, I / 32, 16] bytes and [X, O, I / 32] exponents as [X, I, O] bfloat16."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    number, outputs, groups = scales.shape
    if blocks.shape != (number, outputs, groups, 16):
        raise UserError(f"scales of shape {scales.shape} need 16 bytes each")
    places = np.arange(32 * groups)

    def read(box: Box) -> np.ndarray:
        experts, inputs, rows = box
        wide = np.empty([part.stop - part.start for part in box], ml_dtypes.bfloat16)
        # One expert at a time: in float32 all of them would take twice the result.
        for number, expert in zip(wide, range(experts.start, experts.stop), strict=True):
            words = blocks[expert, rows].reshape(-1, 16 * groups)
            # int32, since uint8 scales below the bias would wrap around.
            exponents = scales[expert, rows].astype(np.int32) - SCALE_BIAS
            numbers = FP4[unpack(words, 4, places[inputs])]
            number[...] = np.ldexp(numbers, exponents[:, places[inputs] // 32]).T
        return wide

    return LazyTensor((number, 32 * groups, outputs), read, dtype=ml_dtypes.bfloat16)


_ZERO = (".weight_zero_point",)
_BLOCKS = Packing((".weight_scale_inv", ".weight"), _plain)
_SCALED = Packing((".weight_scale", ".weight"), _plain, _ZERO)
PACKINGS = {
    "fp8": (_BLOCKS, _SCALED),
    "compressed-tensors": (
        Packing((".weight_global_scale", ".weight_packed", ".weight_scale"), _nvfp4),
        Packing(
            (".weight_packed", ".weight_scale", ".weight_shape"),
            _packed,
            (*_ZERO, ".weight_g_idx"),
        ),
        _SCALED,
    ),
    "modelopt": (
        Packing((".weight_scale_2", ".weight", ".weight_scale"), _nvfp4),
        _BLOCKS,
        _SCALED,
    ),
    "gptq": (Packing((".qweight", ".qzeros", ".scales", ".g_idx"), _gptq),),
    "awq": (Packing((".qweight", ".qzeros", ".scales"), _awq),),
    "mxfp4": (Packing(("_blocks", "_scales"), _mxfp4, end=""),),
}
