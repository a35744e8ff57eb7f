"""The weight files of a checkpoint folder, read lazily, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from clover_jax.checkpoints.gguf_file import TABLE, GgufTensors
from clover_jax.checkpoints.quantized_config import Quantization
from clover_jax.checkpoints.quantized_formats import QuantizedMatrix
from clover_jax.checkpoints.sources import found_below
from clover_jax.errors import UserError, reason_of
from clover_jax.runtime.files import read_json_object
from clover_jax.runtime.progress import say

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".bin", ".pt")
READABLE = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Types of parts of quantized matrices.
_QUANTIZED = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# torch's names of types in safetensors' words; integers are tables of token ids, or quantized.
_TORCH_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TORCH_TYPES |= {"int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
Rows = Callable[[slice], np.ndarray]  # reads rows of a stored tensor
# Modules that wrap a model, in the names of its state dict: torch's DataParallel, its compiler and
# FSDP.
_WRAPPERS = re.compile(r"^(module\.)+|(?<![^.])(_orig_mod|_fsdp_wrapped_module)\.")
# Names of the text's part of a model that also reads images, in transformers' versions.
_PARTS = (
    (r"model\.language_model\.", "model."),
    (r"language_model\.", ""),
    (r"model\.language_model\.", "language_model.model."),
)
# Files of trainers that hold no weights.
_OF_TRAINERS = re.compile("optimizer|scheduler|scaler|training_args|rng_state.*")
_CHUNK = 2**20  # elements checked together: they stay in the processor's cache


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file.

    kind: its type in safetensors' words, or torch's for one that safetensors does not have.
    rows: reads rows of it.
    offset: where it begins in its safetensors file; None in a PyTorch file.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    rows: Rows
    offset: int | None = None

    def view(self) -> np.ndarray:
        """Return the tensor as a view on its file: only copied parts are read."""
        if self.offset is None:
            return self.rows(slice(None))
        # Mapped for this view alone: a lasting map would keep everything that was read resident.
        dtype = (READABLE | _QUANTIZED).get(self.kind)
        if dtype is None:
            raise UserError(f"{self.path}: a tensor is stored as {self.kind}, which is not read")
        return np.memmap(self.path, dtype, "r", self.offset, self.shape).view(np.ndarray)


class TensorFiles:
    """The tensors of one folder: a single file, or shards listed in an index."""

    def __init__(self, directory: Path, quantization: Quantization | GgufTensors | None = None):
        """Read all headers, so that a broken file is named before anything is loaded.

        quantization: how matrices are packed in several tensors, which become one.
        """
        self.directory = directory
        self._files = _files_of(directory)
        stored: dict[str, StoredTensor] = {}
        for path in self._files:
            read = _open_torch if path.suffix in TORCH_SUFFIXES else _open
            for name, tensor in (_open_gguf if path.name == TABLE else read)(path).items():
                if name in stored:
                    raise UserError(
                        f"{directory}: tensor {name} lies in {stored[name].path.name} and "
                        f"in {path.name}; one of them must be left out"
                    )
                stored[name] = tensor
        self._tensors: dict[str, StoredTensor | QuantizedMatrix] = {**stored}
        if quantization is not None:
            self._tensors = quantization.join(stored)
        # What wrappers of torch put into the names of a state dict.
        self._renamed = self._rename(lambda name: _WRAPPERS.sub("", name))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The stored shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def _rename(self, rename: Callable[[str], str]) -> str | None:
        """Rename all tensors; return an example, "a.b is read as b", or None where none changes.

        Raises UserError where two tensors would have one name.
        """
        changed = [name for name in self._tensors if rename(name) != name]
        if not changed:
            return None
        renamed = {rename(name): tensor for name, tensor in self._tensors.items()}
        if len(renamed) < len(self._tensors):
            raise UserError(
                f"{self.directory}: {changed[0]} and {rename(changed[0])} are one tensor by name; "
                "one of them must be left out"
            )
        self._tensors = renamed
        return f"{changed[0]} is read as {rename(changed[0])}"

    def _adopt(self, expected: Iterable[str]) -> None:
        """Rename all tensors where the expected ones differ from them by what lies before."""
        wanted = set(expected)
        if not wanted or wanted <= self._tensors.keys():
            return
        # A whole model as a part of a larger one has one prefix.
        first = min(wanted)
        prefixes = {n.removesuffix(first) for n in self._tensors if n.endswith(f".{first}")}
        renamings = [*_PARTS, *((re.escape(prefix), "") for prefix in sorted(prefixes))]
        for pattern, instead in renamings:

            def rename(name: str, pattern: str = pattern, instead: str = instead) -> str:
                return re.sub(f"^{pattern}", instead, name)

            names = {rename(name) for name in self._tensors}
            if wanted <= names and len(names) == len(self._tensors):
                self._renamed = self._rename(rename)
                return

    def _notices(self) -> list[str]:
        """Return what should be known of files and names."""
        notices = []
        if self._renamed:
            notices.append(
                f"names of tensors were written by a trainer: {self._renamed}, and so on"
            )
        # The index of shards; what the shards hold counts, as in transformers.
        index = self.directory / (TORCH_INDEX if self._files[0].suffix in TORCH_SUFFIXES else INDEX)
        if len(self._files) > 1 and index.is_file():
            shards = {_WRAPPERS.sub("", n): s for n, s in _weight_map(index).items()}
            # Several tensors of the index are one quantized matrix.
            places = {n: t.path.name for n, t in self._tensors.items() if type(t) is StoredTensor}
            wrong = [n for n, place in places.items() if shards.get(n, place) != place]
            wrong += [name for name in places if name not in shards]
            if wrong:
                notices.append(
                    f"{index.name} names another shard, or none, for {_listed(wrong)}; it is read "
                    "from where it lies"
                )
        # A second copy of the weights, or weights that somebody wanted to add.
        suffixes = (".safetensors", ".pth", ".gguf", ".h5", ".msgpack", *TORCH_SUFFIXES)
        unread = [
            path.name
            for path in sorted(self.directory.iterdir())
            if path.suffix in suffixes
            and path not in self._files
            and not _OF_TRAINERS.fullmatch(path.stem)
        ]
        if unread:
            notices.append(f"weights that are not read: {_listed(unread, 'file')}")
        return notices

    def read(
        self, name: str, rows: slice = slice(None), types: Collection[str] = READABLE
    ) -> np.ndarray:
        """Return one tensor, or rows of it, as it is stored; `types` are the allowed stored types.

        Raises UserError for a tensor of another type, or one with NaN in it.
        """
        # Type first: a quantized tensor's bytes would pass the check for finite values.
        tensor = self._checked(name, types)
        if isinstance(tensor, StoredTensor):
            array = tensor.rows(rows)
        else:
            array = np.asarray(tensor.view()[rows])
        check_finite(array, name, tensor.path)
        return array

    def view(self, name: str) -> Any:
        """Return one tensor, unchecked, as a view on its file: only copied parts are read.

        A quantized one is a `LazyTensor`. Raises as `read`.
        """
        return self._checked(name, READABLE).view()

    def dtype(self, name: str) -> np.dtype:
        """Return the type in which a tensor is read; raises as `read`."""
        tensor = self._checked(name, READABLE)
        return READABLE[tensor.kind] if isinstance(tensor, StoredTensor) else tensor.view().dtype

    def check_part(self, names: Iterable[str], part: np.ndarray) -> None:
        """Raise UserError where a part of these tensors holds infinities or NaN, naming which."""
        # Tensors are read again only on a failure: `read` names the bad one.
        if not is_finite(part):
            for name in names:
                self.read(name)

    def _checked(self, name: str, types: Collection[str]) -> StoredTensor | QuantizedMatrix:
        tensor = self._tensors[name]
        if isinstance(tensor, StoredTensor) and tensor.kind not in types:
            unquantized = "; use an unquantized checkpoint" if types is READABLE else ""
            raise UserError(
                f"{tensor.path}: tensor {name} is stored as {tensor.kind}; "
                f"the readable types are {', '.join(types)}{unquantized}"
            )
        return tensor

    def check(self, expected: dict[str, tuple[int, ...]], harmless: Callable[[str], bool]) -> None:
        """Raise UserError naming tensors that are missing, misshapen or unknown, in this order.

        harmless: returns whether a tensor may be there in addition to the expected ones.
        """
        self._adopt(expected)
        for notice in self._notices():
            say(f"{self.directory}: {notice}")
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise UserError(
                f"{self.directory} lacks {_listed(missing)}, which its config.json asks for"
            )
        # Broadcasting would hide a wrong shape.
        for name, shape in expected.items():
            tensor = self._tensors[name]
            if tensor.shape != shape:
                raise UserError(
                    f"{tensor.path}: tensor {name} has shape {tensor.shape}; config.json asks for "
                    f"{shape}"
                )

        # An unknown tensor would be a part of the model that is silently left out.
        unknown = [name for name in self._tensors if name not in expected and not harmless(name)]
        if unknown:
            raise UserError(
                f"{self.directory} has {_listed(unknown)}, which its config.json does not ask for"
            )


def _files_of(directory: Path) -> list[Path]:
    if (directory / TABLE).is_file():
        return [directory / TABLE]
    # One whole file wins over an index, as in transformers.
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return _shards_of(directory / INDEX)
    others = [path for path in directory.glob("*.safetensors") if path.is_file()]
    if len(others) == 1:  # a head's own name, such as medusa_lm_head.safetensors
        return others

    # PyTorch's own format comes last: reading it takes torch.
    if (directory / TORCH_INDEX).is_file():
        return _shards_of(directory / TORCH_INDEX)
    if (directory / TORCH_SINGLE).is_file():
        return [directory / TORCH_SINGLE]
    entries = [path for path in directory.iterdir() if path.is_file()]
    archives = [path for path in entries if path.suffix in TORCH_SUFFIXES]
    if len(archives) == 1:
        return archives
    if archives:
        raise UserError(
            f"{directory} has {len(archives)} PyTorch files and none is {TORCH_SINGLE}; "
            f"save the weights as {SINGLE}"
        )
    if (directory / "_METADATA").is_file():
        raise UserError(
            f"{directory} is an orbax folder, which is not read as a base; "
            "use the safetensors release of the model"
        )
    raise UserError(
        f"{directory} has no weights: neither {SINGLE} nor {INDEX} is there"
        f"{found_below(directory, (SINGLE, INDEX))}"
    )


def _shards_of(index: Path) -> list[Path]:
    weight_map = _weight_map(index)
    # An index from elsewhere must not lead out of its folder.
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise UserError(f"{index} lists the shard {name!r}, which is not a file next to it")

    shards = [index.parent / name for name in names]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise UserError(
            f"{index.parent} lacks {_listed(missing, 'shard')}, which {index.name} lists; "
            "is the download complete?"
        )
    return shards


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map from tensor names to shards")
    return weight_map


def _open(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name."""
    try:
        file = safe_open(path, framework="numpy")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
    # The reader of safetensors does not say where a tensor begins. The format: eight bytes with the
    # header's length, the header in JSON, the tensors.
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))

    def stored(name: str, part: Any) -> StoredTensor:
        begin = 8 + length + header[name]["data_offsets"][0]
        shape = tuple(part.get_shape())
        return StoredTensor(path, part.get_dtype(), shape, part.__getitem__, begin)

    return {name: stored(name, part) for name, part in slices.items()}


def _open_gguf(table: Path) -> dict[str, StoredTensor]:
    """Return the same of a GGUF file, by the table that `gguf_file.gguf_folder` made: its bytes."""
    values = read_json_object(table)
    path = Path(values["file"])

    def stored(shape: list[int], offset: int) -> StoredTensor:
        return StoredTensor(path, "U8", tuple(shape), lambda rows: np.empty(0), offset)

    return {name: stored(shape, offset) for name, (_, shape, offset) in values["tensors"].items()}


def _open_torch(path: Path) -> dict[str, StoredTensor]:
    """Return the same of one PyTorch file; code in its pickle is refused by torch."""
    advice = "save the weights as model.safetensors (save_pretrained of transformers does)"
    # Not imported at the top: most checkpoints need no torch, and it is slow.
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{path} holds PyTorch weights, and torch, which reads them, is not installed; "
            f"{advice} or install torch"
        )
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of some pickles, then refuses
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise UserError(f"{path} cannot be read by torch ({reason_of(error)}); {advice}") from error
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise UserError(f"{path} must hold tensors by name, as a state_dict does; {advice}")

    def read(rows: slice, tensor: Any) -> np.ndarray:
        # The copy is not tied to the file. NumPy does not have bfloat16.
        part = tensor[rows].detach().contiguous()
        if part.dtype == torch.bfloat16:
            return part.view(torch.uint16).numpy().view(ml_dtypes.bfloat16).copy()
        return part.numpy().copy()

    found = {}
    for name, tensor in tensors.items():
        # A type that safetensors does not have keeps torch's name.
        kind = str(tensor.dtype).removeprefix("torch.")
        reader = functools.partial(read, tensor=tensor)
        found[name] = StoredTensor(path, _TORCH_TYPES.get(kind, kind), tuple(tensor.shape), reader)
    return found


def _listed(names: list[str], noun: str = "tensor") -> str:
    # A checkpoint of another model lacks hundreds, so three are named.
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more}"


def check_finite(array: np.ndarray, name: str, place: Path) -> None:
    """Raise UserError naming a tensor with infinities or NaN, with which no draft is accepted."""
    if not is_finite(array):
        raise UserError(f"{place}: tensor {name} holds values that are not finite numbers")


def is_finite(array: np.ndarray) -> bool:
    """Return whether all elements are finite; ten times as fast as NumPy for bfloat16."""
    if array.dtype.kind in "iub":
        return True
    # Infinities and NaN have every bit of the exponent set, which is infinity's own pattern.
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(unsigned)
    bits = np.ascontiguousarray(array).reshape(-1).view(unsigned)
    chunks = (bits[start : start + _CHUNK] for start in range(0, bits.size, _CHUNK))
    return not any(((chunk & infinity) == infinity).any() for chunk in chunks)
