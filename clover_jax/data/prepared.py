"""A folder that `prepare` made: tokenized samples, perhaps with a teacher's activations.

DIR/train.json    manifest of the training samples, shards train-00000.array_record ...
DIR/heldout.json  the same for those that are never trained on
DIR/hidden.json   manifest of activations: record i belongs to training sample i

Before the first of them, `prepare --regenerate` has DIR/regenerated.jsonl.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from clover_jax.data.chat import Encoded
from clover_jax.data.records import TokenRow
from clover_jax.errors import UserError, reason_of
from clover_jax.runtime.files import atomic_file, read_json_object, write_json
from clover_jax.runtime.progress import say
from clover_jax.runtime.row_writer import manifest_path

TRAIN, HELDOUT, HIDDEN = "train.json", "heldout.json", "hidden.json"
REGENERATED = "regenerated.jsonl"
MAX_HELDOUT_READ = 1000


def is_prepared(spec: str) -> bool:
    """Return whether --data names a folder that `prepare` made, or has begun to make."""
    folder = Path(spec).expanduser()
    # A train.json may be a user's list of rows: only a manifest is ours.
    begun = is_manifest(folder / TRAIN) or is_manifest(folder / HELDOUT)
    return begun or manifest_path(folder / REGENERATED).is_file()


class PreparedSamples:
    """Training samples of a prepared folder, with the activations that are asked for."""

    def __init__(self, directory: Path, hidden_names: tuple[str, ...] = ()):
        """Open the folder; raises UserError for what is missing, unfinished or not whole."""
        # `prepare` begins TRAIN after HELDOUT: without it a run was stopped early.
        if not (directory / TRAIN).is_file():
            raise UserError(incomplete(directory))
        if hidden_names and not (directory / HIDDEN).is_file():
            raise UserError(
                f"{directory} has no cached activations; repeat its `prepare` with "
                f"--features={','.join(hidden_names)}, or train with --teacher=online"
            )
        self.directory, self.hidden_names = directory, hidden_names
        self._samples = ShardReader(directory / TRAIN)
        if hidden_names:
            self._check_hidden()

    @functools.cached_property
    def _hidden(self) -> ShardReader:
        # Opened on demand: only a folder with kept activations has this manifest.
        return ShardReader(self.directory / HIDDEN)

    @property
    def made_from(self) -> Mapping[str, Any]:
        """Hashes and settings that the samples depend on."""
        return self._samples.manifest["made_from"]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many samples, tokens and conversations there are; see `SampleCounts`."""
        return self._samples.manifest["counts"]

    @property
    def hidden_made_from(self) -> Mapping[str, Any]:
        """Hashes and settings that the activations depend on."""
        return self._hidden.manifest["made_from"]

    def _check_hidden(self) -> None:
        # A kept activation suits any head that reads it, so more may be there than is asked for.
        there = self.hidden_made_from
        missing = sorted(set(self.hidden_names) - set(there["names"]))
        if missing:
            raise UserError(
                f"{self.directory} has the activations {', '.join(there['names'])}, but not "
                f"{', '.join(missing)}, which the head is trained on; prepare it with "
                f"--features={','.join(self.hidden_names)} --overwrite"
            )
        # Place by place, they belong to the tokens of these very samples.
        differing = [n for n in ("data_hash", "seq_len") if there[n] != self.made_from[n]]
        if differing or len(self._hidden) != len(self._samples):
            raise UserError(
                f"{self.directory / HIDDEN} belongs to other samples than {TRAIN}; repeat the "
                "`prepare` that made them, with --overwrite"
            )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Encoded:
        """Read a sample; raises UserError where its bytes have changed."""
        return Encoded(**self._samples[index])

    def hidden(self, index: int) -> dict[str, np.ndarray]:
        """Read a sample's activations; raises UserError where their bytes have changed."""
        record = self._hidden[index]
        return {name: record[name] for name in self.hidden_names}


def heldout_rows(directory: Path) -> list[TokenRow]:
    """Return the held-out samples, each cut in what comes before its first answer and the rest."""
    samples = ShardReader(directory / HELDOUT)
    count = min(len(samples), MAX_HELDOUT_READ)
    if count < len(samples):
        say(f"{directory / HELDOUT}: the first {count} of {len(samples)} held-out samples are read")
    rows = []
    for index in range(count):
        sample = samples[index]
        tokens, mask = sample["tokens"].tolist(), sample["loss_mask"]
        # Without an answer all is prompt; argmax would be 0.
        answer = int(np.argmax(mask)) if mask.any() else len(tokens)
        source = f"{directory / HELDOUT}:{index}"
        rows.append(TokenRow(source, tuple(tokens[:answer]), tuple(tokens[answer:])))
    return rows


FORMAT_VERSION = 1
Arrays = dict[str, np.ndarray]

# The dtypes that records are written with, by safetensors' names.
_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "I32": np.int32,
    "BOOL": np.bool_,
}


class ShardWriter:
    """The shards of one manifest, in the making."""

    def __init__(self, directory: Path, manifest: str, made_from: Mapping[str, Any]):
        """Begin, or go on where an earlier run of the same `made_from` stopped; refuse any other.

        manifest: the manifest's file name; its stem begins the shards' names.
        """
        self.directory, self.path = directory, directory / manifest
        self._stem = self.path.stem
        self._manifest: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "complete": False,
            "made_from": dict(made_from),
            "shards": [],
        }
        directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._take_up(read_json_object(self.path))
        # A killed run leaves a shard without its final name.
        for left_behind in directory.glob(f".{self._stem}-*.unfinished"):
            left_behind.unlink()
        write_json(self.path, self._manifest)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to write."""
        return self._manifest["complete"]

    @property
    def shards(self) -> list[dict[str, Any]]:
        """The manifest's entries of the shards that are there."""
        return self._manifest["shards"]

    @property
    def num_records(self) -> int:
        """Records in the shards that are there."""
        return sum(shard["records"] for shard in self.shards)

    def write(self, records: Sequence[bytes], **facts: Any) -> None:
        """Write one shard; the manifest keeps `facts` with its name."""
        # Imported here: commands that touch no prepared data run without the library.
        with _explained_absence():
            from array_record.python.array_record_module import ArrayRecordWriter
        name = f"{self._stem}-{len(self.shards):05}.array_record"

        with atomic_file(self.directory / name) as unfinished:
            # One record a group, so that any one can be read alone; vectors do not compress.
            writer = ArrayRecordWriter(str(unfinished), "group_size:1,uncompressed")
            for record in records:
                writer.write(record)
            writer.close()

        # Listed only now that it is whole: a kill before this line loses this shard alone.
        size = (self.directory / name).stat().st_size
        shard = {"file": name, "records": len(records), "bytes": size, **facts}
        self._manifest["shards"].append(shard)
        write_json(self.path, self._manifest)

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Declare that all is there and return the manifest, with `facts` added."""
        totals = {name: sum(s[name] for s in self.shards) for name in ("records", "bytes")}
        self._manifest |= {"complete": True, **totals, **facts}
        write_json(self.path, self._manifest)
        return self._manifest

    def _take_up(self, earlier: dict[str, Any]) -> None:
        """Go on from an earlier run's manifest."""
        _check_version(earlier, self.path)
        wanted = self._manifest["made_from"]
        # Keys of both: one that either lacks counts as different.
        for name in sorted({*wanted, *earlier["made_from"]}):
            before = earlier["made_from"].get(name)
            if before != wanted.get(name):
                raise UserError(
                    f"{self.path} was made with another {name} ({before!r}, not "
                    f"{wanted.get(name)!r}); give another --output, or --overwrite to replace it"
                )

        # Shards after a damaged one are written again: records are numbered through all shards.
        self._manifest = earlier
        whole = list(itertools.takewhile(lambda s: _damage(self.directory, s) is None, self.shards))
        if len(whole) < len(self.shards):
            self._manifest |= {"complete": False, "shards": whole}


class ShardReader:
    """Random access to the records of a complete manifest."""

    def __init__(self, path: Path):
        """Open the manifest at `path`; raises UserError unless all its shards are as written."""
        self.path, self.manifest = path, read_json_object(path)
        _check_version(self.manifest, path)
        if not self.manifest["complete"]:
            raise UserError(incomplete(path.parent))
        for shard in self.manifest["shards"]:
            damage = _damage(path.parent, shard)
            if damage:
                raise UserError(f"{damage}; repeat the `prepare` that made it, which mends it")
        # Number of records up to each shard's end, to name the shard of a damaged record.
        self._ends = list(itertools.accumulate(s["records"] for s in self.manifest["shards"]))
        paths = [path.parent / shard["file"] for shard in self.manifest["shards"]]
        # ArrayRecord cannot open an empty list; there may be no held-out samples.
        self._source: Any = ()
        if paths:
            with _explained_absence():
                from grain.sources import ArrayRecordDataSource
            self._source = ArrayRecordDataSource([str(path) for path in paths])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Arrays:
        """Return a record's arrays; raises UserError where its bytes have changed."""
        # ArrayRecord raises where a record's hash does not fit.
        try:
            return unpack(self._source[index])
        except (RuntimeError, ValueError, safetensors.SafetensorError) as error:
            shard = self.manifest["shards"][bisect.bisect_right(self._ends, index)]["file"]
            reason = reason_of(error)
            raise UserError(
                f"{self.path.parent / shard}: record {index} is damaged ({reason}); delete that "
                "file and repeat the `prepare` that made it"
            ) from error


def is_manifest(path: Path) -> bool:
    """Return whether a file, which may be anybody's and large, is a manifest of shards."""
    if not path.is_file():
        return False
    # The first key is enough; parsing a user's file of gigabytes would take minutes.
    with path.open("rb") as file:
        return file.read(40).lstrip(b"{ \n").startswith(b'"format_version"')


def incomplete(directory: Path) -> str:
    """Return the message for a folder that `prepare` has not finished."""
    return f"{directory} is not complete; repeat the `prepare` that makes it"


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes of a record."""
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})


def unpack(record: bytes) -> Arrays:
    """Return a record's arrays; bfloat16 among them, which the library's own reader lacks."""
    return {
        name: np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in safetensors.deserialize(record)
    }


def in_shards(records: Iterator[bytes], max_bytes: int) -> Iterator[list[bytes]]:
    """Group records in order until `max_bytes` are reached.

    Example: sizes 3, 3, 3 with max_bytes 5 give two shards, of 2 records and of 1.
    """
    # A record is never cut, so a shard may be larger by one.
    shard, size = [], 0
    for record in records:
        shard.append(record)
        size += len(record)
        if size >= max_bytes:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


@contextlib.contextmanager
def _explained_absence() -> Iterator[None]:
    """Turn the lack of the library into a user's message; it comes with grain, not everywhere."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"prepared data need the package array_record, which this platform lacks ({error}); "
            "train on the raw files instead"
        ) from error


def _check_version(manifest: dict[str, Any], path: Path) -> None:
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {version!r}; this program reads {FORMAT_VERSION}"
        )


def _damage(directory: Path, shard: dict[str, Any]) -> str | None:
    """Say what is wrong with a shard's file; None for nothing."""
    # By size alone: opening must be fast, and reading checks every record's hash.
    path = directory / shard["file"]
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    return None if size == shard["bytes"] else f"{path} has {size} bytes, not {shard['bytes']}"
