"""The options of `generate`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clover_jax.decoding.spec import NO_DRAFT, ModelSpec
from clover_jax.decoding.tree_config import AUTO
from clover_jax.errors import UserError
from clover_jax.field_types import setting


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The flags of `generate` in addition to `ModelSpec` and `GenerationSettings`."""

    spec: ModelSpec
    seed: int
    prompt: str | None = setting(None, "text to continue")
    prompts: str | None = setting(
        None, "FILE,FILE: prompt rows, .jsonl (also .gz, .xz); - is standard input"
    )
    batch_size: int = setting(8, "rows decoded at once, with --prompts", least=1)
    output: str | None = setting(None, "file for the rows [stdout, with --prompts]")
    overwrite: bool = setting(False, "replace the rows in --output [resume them]")
    strict: bool = setting(False, "stop at the first row that fails")

    def __post_init__(self):
        if self.searches_tree and self.spec.draft == NO_DRAFT:
            raise UserError("--tree=auto chooses a tree for a draft; give --draft=DIR")
        if self.searches_tree and self.spec.copy:
            raise UserError(
                f"--copy={self.spec.copy}: --tree=auto tries copies itself; leave --copy out, or "
                "name a tree"
            )
        if self.prompt is not None and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other; give one of them")
        if self.path is None:
            if self.overwrite:
                raise UserError("--overwrite is for --output=FILE, which is missing")
            return

        # The rows must not replace the prompts, and must be readable when the run is resumed.
        inputs = filter(None, (self.prompts or "").split(","))
        if self.path.resolve() in [Path(path).expanduser().resolve() for path in inputs]:
            raise UserError(f"--output={self.output} is a file of prompts; give another name")
        # /dev/stdout looks like a file if it is redirected to one; /dev/shm has real files.
        is_device = Path("/dev") in self.path.parents and Path("/dev/shm") not in self.path.parents
        is_file = self.path.is_file() or self.path.is_dir() or not self.path.exists()
        if is_device or not is_file:
            raise UserError(
                f"--output={self.output} is not a regular file, which a stopped run needs to "
                "resume; leave --output out to print the rows on stdout"
            )

    @property
    def searches_tree(self) -> bool:
        """Whether the tree is chosen by measurement."""
        return self.spec.tree == AUTO

    @property
    def path(self) -> Path | None:
        """The file for the rows."""
        return None if self.output is None else Path(self.output).expanduser()

    @property
    def begun(self) -> Path | None:
        """The row file that this run resumes, if it resumes one."""
        return None if self.overwrite else self.path

    @property
    def is_live(self) -> bool:
        """Whether one row is streamed."""
        return self.prompts is None
