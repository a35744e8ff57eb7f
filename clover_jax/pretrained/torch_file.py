"""PyTorch's weight archives, read without running what is in them.

A `.bin` or `.pt` file is a zip archive with a pickle, and a pickle can hold code. It is opened by
torch's own reader of weights only, which refuses code, after the archive was looked at: entries
that are compressed (torch never does that) could unpack to any size.
"""

from __future__ import annotations

import importlib.util
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from clover_jax.errors import UserError, reason_of

_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TYPES |= {"int64": "I64", "bool": "BOOL"}  # tables of token ids beside the weights
_ADVICE = "save the weights as model.safetensors (save_pretrained of transformers does)"


class TorchSlice:
    """One tensor of an archive, not yet read, by the methods of a slice of safetensors."""

    def __init__(self, tensor: Any):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return its type by safetensors' name, or by torch's where that has none."""
        name = str(self._tensor.dtype).removeprefix("torch.")
        return _TYPES.get(name, name)

    def __getitem__(self, rows: slice) -> np.ndarray:
        import torch

        # Views and gradients are torch's own; the copy is not tied to the file.
        tensor = self._tensor[rows].detach().contiguous()
        if tensor.dtype == torch.bfloat16:  # which NumPy does not have
            return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16).copy()
        return tensor.numpy().copy()


def open_torch(path: Path) -> dict[str, TorchSlice]:
    """Return the tensors of one archive by name.

    Raises UserError for what is no archive of tensors alone, and where torch is not installed.
    """
    # Not imported here: most checkpoints need no torch, and it is slow.
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{path} holds PyTorch weights, and torch, which reads them, is not installed; "
            f"{_ADVICE} or install torch"
        )
    _check_archive(path)
    return {name: TorchSlice(tensor) for name, tensor in _load(path).items()}


def _check_archive(path: Path) -> None:
    # torch stores entries uncompressed and by plain names; anything else is no weight archive.
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{path} is not a whole PyTorch archive ({error}); {_ADVICE}") from error

    # Sizes and types before anything is unpacked: a small file must not fill the disk or memory.
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise UserError(f"{path} would unpack to more than its size; it is no weight archive")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise UserError(f"{path}: entry {entry.filename!r} is compressed; torch writes none so")
        parts = entry.filename.replace("\\", "/").split("/")
        if ".." in parts or entry.filename.startswith(("/", "\\")):
            raise UserError(f"{path}: entry {entry.filename!r} leads out of the archive")


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of some pickles, then refuses
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = reason_of(error)
        raise UserError(f"{path} holds more or less than tensors ({reason}); {_ADVICE}") from error
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise UserError(f"{path} must hold tensors by name, as a state_dict does; {_ADVICE}")
    return tensors
