"""The options of `evaluate` and of `convert`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from clover_jax.decoding.spec import AUTO_TREE, ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import check_unread, setting

VANILLA = "vanilla"  # plain decoding's name in files
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")  # of a draft, which names a file

# Written out, as the table of layouts imports JAX and `--help` must not; a test compares both.
TARGETS = (
    *("orbax", "clover2", "eagle", "eagle_vllm", "eagle_sglang", "eagle3", "eagle3_tpu"),
    *("dflash2", "mtp", "medusa", "medusa_vllm", "speculators"),
)

_verifying = functools.partial(setting, group="verifying")


def display_name(method: str) -> str:
    """Return a method's name for readers."""
    return "plain decoding" if method == VANILLA else method


@dataclasses.dataclass(frozen=True)
class DraftChoice:
    """A draft to measure.

    name: in reports and of its row file. source: as `ModelSpec.draft`. tree: None: the draft's own.
    """

    name: str
    source: str
    tree: str | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of `evaluate` in addition to `ModelSpec` and `GenerationSettings`.

    spec: of plain decoding; a draft's spec has another draft and tree. workdir: default `output`.
    """

    spec: ModelSpec
    seed: int
    workdir: Path
    drafts: str | None = setting(
        None,
        "NAME=DIR,NAME=DIR or DIR,DIR: the drafts to measure, each as generate's --draft",
        group="draft",
    )
    tree: str | None = setting(
        None,
        "drafted tree of all drafts, or NAME=TREE,NAME=TREE: paper25, chain:P, "
        "dynamic:NODES:DEPTH:WIDTH, clover4, file:PATH, copy:NODES, auto (time a few trees and use "
        "the fastest) [the one the draft was measured with, else by its kind]",
        group="draft",
    )
    baselines: str | None = setting(
        None,
        "training-free drafts to include as baselines, such as lookup; none disables them [all, "
        "unless drafted tokens are sampled]",
        group="draft",
    )
    prompts: str | None = setting(
        None,
        "FILE,FILE: prompt rows, .jsonl (also compressed); a row's `category` names its task in "
        "the report, else its file does; a final assistant message is dropped and decoded again "
        "[the base's own]",
    )
    output: str | None = setting(None, "folder for the report [the workdir]")
    batch_size: int = setting(
        8, "rows decoded at once; rounded up to equal rows per device of a mesh", least=1
    )
    batch_sizes: str | None = setting(None, "more batch sizes to time, such as 1,4,16")
    repeats: int = setting(3, "repetitions of every pass; the median is reported", least=1)
    limit_prompts: int | None = setting(None, "most rows of each task [all]", least=1)
    overwrite: bool = setting(False, "delete earlier results in the output folder")
    compare: str | None = setting(None, "A,B: two reports to compare; nothing is decoded")

    def __post_init__(self):
        # Parse them once, so that mistakes are raised before anything is loaded.
        _, choices = self.all_batch_sizes, self.draft_choices
        if self.spec.copy and any(choice.tree == AUTO_TREE for choice in choices):
            raise UserError(
                f"--copy={self.spec.copy}: the tree auto tries copies itself; leave --copy out, or "
                "use NAME=TREE+copy:NODES for the other drafts"
            )

    @property
    def directory(self) -> Path:
        return Path(self.output or self.workdir).expanduser()

    def rows_path(self, name: str) -> Path:
        return self.directory / "rows" / f"{name}.jsonl"

    @property
    def draft_choices(self) -> list[DraftChoice]:
        return parse_drafts(self.drafts or "", self.tree)

    @property
    def all_batch_sizes(self) -> list[int]:
        """`batch_size` first, then the others of `batch_sizes`."""
        words = list(filter(None, map(str.strip, (self.batch_sizes or "").split(","))))
        for word in words:
            if not (word.isdecimal() and int(word) > 0):
                raise UserError(
                    f"--batch_sizes={self.batch_sizes}: {word!r} is not a batch size; write whole "
                    "numbers from 1, such as 1,4,8"
                )
        # Each once: a batch size is a key of the report.
        return list(dict.fromkeys([self.batch_size, *map(int, words)]))


def parse_drafts(drafts: str, tree: str | None) -> list[DraftChoice]:
    """Return the drafts of "NAME=DIR,NAME=DIR", with the trees of "TREE" or "NAME=TREE,...".

    A draft without a name takes its folder's name.

    Example: "a=x,b=y" with the trees "b=chain:4" gives a=x with its own tree and b=y with chain:4;
    "runs/eagle" is eagle=runs/eagle.
    """
    sources: dict[str, str] = {}
    for item in filter(None, map(str.strip, drafts.split(","))):
        name, equals, source = item.partition("=")
        if not equals:
            name, source = Path(item).name, item
        if not (source and _NAME.fullmatch(name)):
            raise UserError(
                f"--drafts: {item!r} should be NAME=DIR or DIR; a name may have letters, digits "
                "and ._+-"
            )
        # Row files have these names, so no two methods may share one.
        if name == VANILLA:
            raise UserError(f"--drafts: the name {VANILLA!r} stands for plain decoding")
        if name in sources:
            raise UserError(f"--drafts: the name {name!r} is given twice; each draft needs its own")
        sources[name] = source

    # Names of trees have no equals sign.
    if tree is None or "=" not in tree:
        return [DraftChoice(name, source, tree) for name, source in sources.items()]
    trees: dict[str, str] = {}
    for item in tree.split(","):
        name, _, value = item.strip().partition("=")
        if name not in sources or not value:
            known = ", ".join(sources) or "none"
            raise UserError(f"--tree: {item!r} should be NAME=TREE; the drafts are {known}")
        trees[name] = value
    return [DraftChoice(name, source, trees.get(name)) for name, source in sources.items()]


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """The flags of `convert` in addition to `ModelSpec`, which names the head's base."""

    spec: ModelSpec
    input: str = setting("", "the head to convert")
    output: str = setting("", "folder to write")
    to: str = setting("orbax", "layout to write", choices=TARGETS)
    cut_vocab: bool = setting(False, "leave out rows beyond the base's vocabulary (padding)")
    overwrite: bool = setting(False, "replace the draft head at --output")
    verify: bool = _verifying(False, "decode with both heads; fail where accepted lengths differ")
    prompts: str | None = _verifying(
        None, "prompts to verify with [the base's prompts.jsonl, else tokens of its vocabulary]"
    )
    num_prompts: int = _verifying(8, "maximum number of prompts to verify with", least=1)
    max_new_tokens: int = _verifying(64, "tokens to decode for each prompt", least=2)

    def __post_init__(self):
        for name in ("input", "output"):
            if not getattr(self, name):
                raise UserError(f"--{name} is missing; give the folder")
        check_unread(self, ["prompts", "num_prompts", "max_new_tokens"], "verify", self.verify)
