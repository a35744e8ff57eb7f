"""A safetensors file written piece by piece, so that no tensor has to be in memory whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clover_jax.pretrained.tensor_files import READABLE

# Readers know these besides: what a mapping of token ids is stored as.
_NAMES = {dtype: name for name, dtype in READABLE.items()} | {
    np.dtype(np.int64): "I64",
    np.dtype(np.bool_): "BOOL",
}


class StreamedTensor(NamedTuple):
    """One tensor: its name, type and shape, and its values in order, in parts."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterator[np.ndarray]


def write_safetensors(path: Path, tensors: Sequence[StreamedTensor]) -> Iterator[str]:
    """Write the tensors, yielding the name of each once it is written.

    The format: the header's length in 8 bytes, a JSON header padded to a multiple of 8, then the
    values without gaps. Wide types come first, so that each tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in ordered:
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            begin = file.tell()
            for part in tensor.parts:
                file.write(np.ascontiguousarray(part).view(np.uint8).data)
            written = file.tell() - begin
            wanted = math.prod(tensor.shape) * tensor.dtype.itemsize
            if written != wanted:
                raise ValueError(f"{tensor.name}: {written} bytes written, {wanted} announced")
            yield tensor.name
