"""The options of `generate`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clover_jax.decoding.tree_config import AUTO
from clover_jax.errors import UserError
from clover_jax.field_types import setting
from clover_jax.loading.spec import NO_DRAFT, ModelSpec
from clover_jax.storage.row_shards import Shard


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The flags of `generate` beside those of `ModelSpec` and `GenerationSettings`."""

    spec: ModelSpec
    seed: int
    prompt: str | None = setting(None, "text to continue")
    prompts: str | None = setting(
        None, "file of prompt rows, .jsonl (also .gz, .xz); - is standard input"
    )
    calibration: str | None = setting(
        None, "prompt rows for --tree=auto [the base's own, or shipped]", group="draft"
    )
    batch_size: int = setting(8, "rows decoded at once, with --prompts", least=1)
    output: str | None = setting(None, "file for the rows [stdout, with --prompts]")
    overwrite: bool = setting(False, "start --output anew, whatever is there")
    shard: str | None = setting(
        None,
        "I/N: decode the I-th of N parts of --prompts, counted from 0, into a file beside --output",
    )
    join: bool = setting(
        False, "make --output of the files that all parts of --shard wrote; nothing is decoded"
    )
    strict: bool = setting(False, "stop at the first row that fails")

    def __post_init__(self):
        # A flag that would do nothing is a misunderstanding.
        if self.calibration is not None and not self.searches_tree:
            raise UserError(
                f"--calibration={self.calibration} is for --tree=auto; add that, or leave it out"
            )
        if self.searches_tree and self.spec.draft == NO_DRAFT:
            raise UserError("--tree=auto chooses a tree for a draft; give --draft=DIR")

        if self.searches_tree and self.spec.copy:
            raise UserError(
                f"--copy={self.spec.copy}: --tree=auto tries copies itself; leave --copy out, or "
                "name a tree"
            )

        # What the prompts are, and where rows go, before minutes are spent on a base.
        if self.prompt is not None and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other; give one of them")
        inputs = [path for path in (self.prompts, self.calibration) if path is not None]
        if self.output is not None and _resolved(self.output) in map(_resolved, inputs):
            raise UserError(f"--output={self.output} is a file of prompts; give another name")
        if self.output is not None and not _can_keep_rows(Path(self.output).expanduser()):
            raise UserError(
                f"--output={self.output} is no file that rows can be kept in: a run that was "
                "stopped goes on from the rows in its file; leave --output out to have them on "
                "stdout"
            )
        # Parts lie beside the whole, so all need its name.
        if self.join and (self.output is None or self.shard is not None):
            raise UserError("--join needs --output=FILE as the parts had it, and no --shard")
        if self.shard is not None and (self.prompts is None or self.output is None):
            raise UserError(f"--shard={self.shard} is for --prompts=FILE with --output=FILE")
        if self.overwrite and self.output is None:
            raise UserError("--overwrite is for --output=FILE, which is missing")

    @property
    def searches_tree(self) -> bool:
        """Whether the tree is found by measurement."""
        return self.spec.tree == AUTO

    @property
    def part(self) -> Shard:
        """The part of the rows that is decoded."""
        return Shard.parse(self.shard)

    @property
    def path(self) -> Path | None:
        """The file for the rows of this part."""
        return None if self.output is None else self.part.path(Path(self.output).expanduser())

    @property
    def begun(self) -> Path | None:
        """The row file that this run resumes; None where there is nothing to resume."""
        return None if self.overwrite else self.path

    @property
    def is_live(self) -> bool:
        """Whether one row is streamed."""
        return self.prompts is None


def _resolved(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _can_keep_rows(path: Path) -> bool:
    """Return whether a path is, or may become, a regular file; folders are refused elsewhere."""
    # /dev/stdout may look like a file, where it is redirected to one; /dev/shm has real ones.
    is_device = Path("/dev") in path.parents and Path("/dev/shm") not in path.parents
    return not is_device and (path.is_file() or path.is_dir() or not path.exists())
