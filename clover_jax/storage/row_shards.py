"""Row files of jobs that share the rows of one input, and the one file that they join to.

Job I of N writes the rows of its part in order to its own file: for out.jsonl it is
out.I-of-N.jsonl. Its manifest is that of the whole, with an entry for the part.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

from clover_jax.errors import UserError
from clover_jax.storage.files import atomic_file, lock, write_json
from clover_jax.storage.json_files import read_json_object
from clover_jax.storage.row_writer import check_index, first_difference, manifest_path


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `count` jobs, counted from 0; the only one by default."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Return the shard of `--shard`, as in 0/4 to 3/4; None is the whole.

        Raises UserError for anything else.
        """
        if text is None:
            return cls()
        words = re.fullmatch(r"(\d+)/(\d+)", text)
        if words is None or not int(words[1]) < int(words[2]):
            raise UserError(f"--shard={text} must be I/N with I from 0 to N - 1, such as 0/4")
        return cls(int(words[1]), int(words[2]))

    def rows(self, total: int) -> range:
        """Return this job's rows of all.

        Example: of 10 rows, job 0 of 4 has rows 0 and 1, job 1 has 2, 3 and 4.
        """
        # Rounded down at both ends: parts join without gaps and differ by one row at most.
        return range(self.index * total // self.count, (self.index + 1) * total // self.count)

    def path(self, whole: Path) -> Path:
        """Return this job's file of a whole row file, itself where there is one job."""
        if self.count == 1:
            return whole
        return whole.with_name(f"{whole.stem}.{self.index}-of-{self.count}{whole.suffix}")

    def entry(self, total: int) -> dict[str, int] | None:
        """Return the manifest's entry for a part; None for the whole."""
        part = {"index": self.index, "count": self.count, "total": total}
        return None if self.count == 1 else part


def join_rows(whole: Path, overwrite: bool = False) -> None:
    """Write `whole` and its manifest, of the files of all its shards.

    It writes the same as a single job, so that job's command resumes from there.
    Raises UserError, before anything is written, for a shard or rows that are missing, a shard that
    is being written, shards of different settings or prompts, and where `whole` exists already.
    """
    if whole.exists() and not overwrite:
        raise UserError(f"{whole} exists already; give another --output, or --overwrite")

    # Every mistake is found before the first row is written.
    shards = _shards_of(whole)
    total, manifest, seconds = 0, None, 0.0
    for shard in shards:
        path = shard.path(whole)
        of_shard = read_json_object(manifest_path(path))
        if not of_shard.keys() >= {"format", "prompts_hash", "settings", "shard"}:
            raise UserError(f"{manifest_path(path)} is of no shard; run its job with --overwrite")
        seconds += of_shard.pop("seconds", 0.0)
        entry = of_shard.pop("shard")
        # The first shard says how many rows there are; all others must agree.
        if manifest is None:
            manifest, total = of_shard, entry["total"]
        difference = first_difference(of_shard, manifest)
        if difference:
            raise UserError(f"{path} was written with {difference} as {shards[0].path(whole)}")
        if entry != shard.entry(total):
            raise UserError(f"{path} says that it is shard {entry}, not {shard.entry(total)}")
    for shard in shards:
        # Manifests may agree although a file has too few or too many rows.
        _check_rows(shard, whole, total)

    # The manifest first: rows without one could not be resumed.
    write_json(manifest_path(whole), {**(manifest or {}), "seconds": seconds})
    with atomic_file(whole) as unfinished, unfinished.open("wb") as file:
        for shard in shards:
            with shard.path(whole).open("rb") as part:
                shutil.copyfileobj(part, file)


def _shards_of(whole: Path) -> list[Shard]:
    """Return all shards of a row file, whose files must be there."""
    name = re.compile(rf"{re.escape(whole.stem)}\.(\d+)-of-(\d+){re.escape(whole.suffix)}")
    names = filter(None, (name.fullmatch(path.name) for path in whole.parent.glob("*")))
    there = {Shard(int(name[1]), int(name[2])) for name in names}
    # Of two numbers of jobs nobody can say which was meant: one may be left from an earlier run.
    counts = sorted({shard.count for shard in there})
    if len(counts) != 1:
        which = "no shard" if not counts else f"shards of {' and of '.join(map(str, counts))} jobs"
        raise UserError(
            f"{which} of {whole} beside it; expected all N files like {Shard(0, 4).path(whole)}, "
            "which --shard=I/N writes, for one N"
        )

    shards = [Shard(index, counts[0]) for index in range(counts[0])]
    missing = [f"{shard.index}/{shard.count}" for shard in shards if shard not in there]
    if missing:
        raise UserError(f"{whole}: shards {', '.join(missing)} are missing; run them with --shard")
    return shards


def _check_rows(shard: Shard, whole: Path, total: int) -> None:
    """Raise UserError where a shard's file has not all rows of its part, and no others."""
    path, wanted = shard.path(whole), shard.rows(total)
    there = 0
    with path.open("r+b") as file:
        if not lock(file):
            raise UserError(f"{path} is being written; wait for its job")
        for there, (index, line) in enumerate(zip(wanted, file, strict=False), start=1):
            # A kill tears the last line, which then counts as missing.
            if not line.endswith(b"\n"):
                there -= 1
                break
            check_index(line, index, path, there)
        # What `zip` has left of the file: rows too many, if any.
        more = file.read()
    if there < len(wanted) or more:
        has = f"more than its {len(wanted)}" if more else f"{there} of its {len(wanted)}"
        raise UserError(
            f"{path} has {has} rows; run its job again, with --shard={shard.index}/{shard.count}"
        )
