"""The names of a base, a draft and a tree; nothing here imports JAX, so flags are made from it."""

from __future__ import annotations

import dataclasses
import functools

from clover_jax.field_types import COMMON, BaseSettings, ChatSettings, setting

NO_DRAFT = "none"  # --draft for plain decoding
AUTO_TREE = "auto"  # --tree for the fastest of a few trees, measured: decoding/race.py
RANDOM = "random:"  # before a drafter's kind: a head with random weights

_draft = functools.partial(setting, group="draft")
_foreign = functools.partial(setting, group="third-party drafts")


@dataclasses.dataclass(frozen=True)
class ModelSpec(ChatSettings, BaseSettings):
    """A base, a draft and a tree, as a user names them.

    draft: "random:KIND" is a head with random weights, "random:KIND:NAME=VALUE,..." has options,
        those of its kind and draft_vocab, the size of a reduced vocabulary.
    tree: None is the draft's recorded tree, or `default_tree`.
    tokenizer: False where no text is read or written; chat templates are not compared then.
    """

    draft: str = _draft(
        NO_DRAFT,
        "a draft directory, a training workdir, a hub id, or a folder in an official layout; "
        "mtp: the drafting layer stored with the base (Qwen3-Next, Qwen3.5); "
        "lookup: the continuation of the longest earlier match in the text; recycle: the base's "
        "latest predictions after the same token (token recycling); none: plain decoding",
    )
    tree: str | None = _draft(
        None,
        "drafted tree: paper25, chain:P, dynamic:NODES:DEPTH:WIDTH (the NODES most probable of "
        "DEPTH levels [6], each WIDTH [8] wide), clover4, file:PATH, copy:NODES, or, in generate "
        "and evaluate, auto: time a few trees and plain decoding on the run's prompts and use the "
        "fastest [the one the draft was measured with, else its kind's: paper25, or clover4 where "
        "the head is less deep]",
    )
    copy: int = _draft(
        0,
        "prompt-lookup nodes added to the tree, the continuation of the longest earlier match in "
        "the text, as in --tree=TREE+copy:NODES",
        least=0,
    )
    copy_from: str | None = _draft(None, "a text file to copy from too, shared by all rows")
    mesh: str | None = setting(
        None, 'devices along each axis, such as "data=2,fsdp=-1"; -1 uses the rest', group=COMMON
    )
    attention: str = setting(
        "auto",
        "attention over the KV cache: XLA's own program, a Pallas kernel for TPU, which a CPU "
        "interprets, slowly, or cuDNN's attention on a GPU; auto: xla on a CPU, else the faster of "
        "xla and the kernel, timed when the command starts",
        group=COMMON,
        choices=("auto", "xla", "pallas", "cudnn"),
    )
    int8: tuple[str, ...] = _draft(
        (), "quantize matrices to 8 bits: draft (the text stays as it is), or base,draft"
    )
    draft_rope_theta: float | None = _foreign(
        None, "RoPE base, for a layout that does not record it"
    )
    allow_base_mismatch: bool = _foreign(
        False, "use a draft that was trained for another base or chat template"
    )
    # Not a flag: commands that handle no text set it to False.
    tokenizer: bool = True
