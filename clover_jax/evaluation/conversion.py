"""Run `convert`: a head in, the same head out in another layout, verified by decoding with both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flax.traverse_util import unflatten_dict

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.card import CARD, native_directory, write_native
from clover_jax.checkpoints.layouts import NATIVE, layout_for, recognize
from clover_jax.checkpoints.loading import open_base
from clover_jax.checkpoints.stored_head import StoredHead, open_head, read_draft, write_foreign
from clover_jax.data.prompts import SHIPPED_PROMPTS, Prompt, read_prompts
from clover_jax.decoding.models import Models, load
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_stream import RowTotals, open_stream
from clover_jax.decoding.tree_config import default_tree, parse_tree
from clover_jax.errors import UserError
from clover_jax.evaluation.options import ConvertOptions
from clover_jax.runtime.files import check_replaceable, put_in_place, scratch_directory
from clover_jax.runtime.progress import say

BATCH_SIZE = 4


def convert(options: ConvertOptions) -> dict[str, Any]:
    """Convert a head and return a report; with `verify`, whether it decodes as before.

    Nothing is written to `output` unless everything succeeds. Raises UserError for a head,
    a layout or a folder that does not allow it.
    """
    output, base = Path(options.output).expanduser(), open_base(options.spec.base)
    _check_output(output, options, base)
    mismatch = options.spec.allow_base_mismatch
    head = open_head(
        options.input,
        base,
        rope_theta=options.spec.draft_rope_theta,
        allow_base_mismatch=mismatch,
        cut_vocab=options.cut_vocab,
    )
    report: dict[str, Any] = {
        "input": options.input,
        "from": head.layout,
        "to": options.to,
        "output": str(output),
        "drafter": head.config.kind,
        "dtype": str(head.dtype),
    }
    if not options.verify:
        write_head(output, head, options.to, base, options.input)
        return report | {"bytes": _num_bytes(output)}

    # Written next to its place, and moved there if it decodes as the source does.
    prompts = _verification_prompts(base, options.prompts, options.num_prompts)
    with scratch_directory(output) as scratch:
        staged = scratch / "head"
        write_head(staged, head, options.to, base, options.input)
        # The written head is opened like any other, through the same checks.
        result = open_head(str(staged), base, allow_base_mismatch=mismatch)
        report["bytes"] = _num_bytes(staged)
        report |= verify(load(options.spec), head, result, prompts, options.max_new_tokens)
        if report["differing"]:
            return report | {"output": None}
        put_in_place(staged, output)
    return report


def _check_output(output: Path, options: ConvertOptions, base: BaseModel) -> None:
    # A folder that is read must not be replaced, nor a folder that contains it.
    source = Path(options.input).expanduser()
    head = native_directory(source) or source  # of a workdir, the head in it
    read = {"input": (source, head), "base": (base.directory,)}
    for name, folders in read.items():
        if any(folder.resolve().is_relative_to(output.resolve()) for folder in folders):
            raise UserError(
                f"--output={options.output} is or holds the {name}; give another folder"
            )

    def is_head(folder: Path) -> bool:
        # A base has a config.json too, and must not be replaced.
        try:
            return (folder / CARD).is_file() or bool(recognize(folder))
        except UserError:
            return False

    check_replaceable(output, options.overwrite, "draft head", is_head)


def write_head(output: Path, head: StoredHead, to: str, base: BaseModel, source: str) -> None:
    """Write a head in the layout `to`."""
    if to != NATIVE:
        layout = layout_for(to, head.config.kind)
        write_foreign(output, head, layout, base)
        say(layout.warning)
        return
    # Its provenance stays, so that data and figures travel with it.
    provenance = head.card.provenance | {"converted_from": source}
    params = unflatten_dict({path: head.read(path) for path in head.shapes})
    write_native(output, dataclasses.replace(head.card, provenance=provenance), params)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _verification_prompts(base: BaseModel, path: str | None, count: int) -> list[Prompt]:
    """Return up to `count` prompts of a file, of the base's folder, or of single tokens."""
    # A file that was named must exist; the base's own may be missing.
    file = Path(path).expanduser() if path else base.directory / SHIPPED_PROMPTS
    if path or file.is_file():
        return read_prompts(file)[:count]

    # Any text shows a difference of two heads, and the base writes it. The tokens are spread over
    # the vocabulary, since many vocabularies begin with special tokens and bytes.
    source = "single tokens of the base's vocabulary"
    say(f"prompts to verify with: {source}")
    step = max(1, base.config.vocab_size // count)
    tokens = range(0, base.config.vocab_size, step)[:count]
    return [Prompt(i, source, prompt_ids=(token,)) for i, token in enumerate(tokens)]


def verify(
    base: Models, source: StoredHead, result: StoredHead, prompts: list[Prompt], max_new_tokens: int
) -> dict[str, Any]:
    """Decode greedily with both heads; return both taus and the prompts whose rows differ."""
    # One tree for both: a third-party layout does not store the tree of its head.
    tree = parse_tree(source.card.tree or default_tree(source.config.max_depth))
    settings = GenerationSettings(max_new_tokens=max_new_tokens)

    def rows(head: StoredHead) -> dict[int, dict[str, Any]]:
        models = dataclasses.replace(base, draft=read_draft(head, base.dtype), tree=tree)
        # Strict: a failed row would compare equal to another failed row.
        stream = open_stream(models, prompts, settings, batch_size=BATCH_SIZE, strict=True)
        return {event.row["index"]: event.row for event in stream if event.row is not None}

    one, other = rows(source), rows(result)
    taus = [round(RowTotals(decoded.values()).tau or 0.0, 4) for decoded in (one, other)]

    def differs(index: int, key: str) -> bool:
        return one[index][key] != other[index][key]

    # Lengths too: a damaged head produces the same text in more steps.
    differing = [i for i in one if differs(i, "accepted") or differs(i, "output_ids")]
    figures = {"tau_source": taus[0], "tau_result": taus[1]}
    return figures | {"prompts": len(one), "differing": differing}
