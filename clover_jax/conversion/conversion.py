"""Run `convert`: a head in, the same head out in another layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.conversion.options import ConvertOptions
from clover_jax.conversion.publish import (
    check_repository,
    license_of,
    public_name,
    read_token,
    upload,
    write_card,
)
from clover_jax.conversion.verification import verification_prompts, verify
from clover_jax.errors import UserError
from clover_jax.interchange.card import CARD, native_directory
from clover_jax.interchange.layouts import NATIVE, layout_for, recognise
from clover_jax.interchange.stored_head import StoredHead, open_head
from clover_jax.interchange.write_head import write_foreign, write_native
from clover_jax.loading.models import load
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.loading import open_base
from clover_jax.runtime.progress import say
from clover_jax.storage.files import check_replaceable, put_in_place, scratch_directory


def convert(options: ConvertOptions) -> dict[str, Any]:
    """Convert a head, and publish it where that is asked for; return what to report.

    Raises UserError for what cannot be done.
    """
    output, base = Path(options.output).expanduser(), open_base(options.spec.base)
    _check_output(output, options, base)

    # A card that cannot be written stops everything before anything is.
    if options.push:
        check_repository(options.push)
        if not options.card_only:
            read_token(options.push)
        base_model = public_name(base, options.base_model)
        terms = license_of(base, options.license)

    head = open_head(
        options.input,
        base,
        rope_theta=options.spec.draft_rope_theta,
        allow_base_mismatch=options.spec.allow_base_mismatch,
        cut_vocab=options.cut_vocab,
    )
    report = convert_head(options, base, head, output)

    # A head that decodes otherwise than before is not there to be published.
    if options.push and report["output"]:
        write_card(output, head, options.to, base_model, terms, options.push)
        address = None if options.card_only else upload(output, options.push)
        report |= {"repository": options.push, "uploaded": address}
    return report


def convert_head(
    options: ConvertOptions, base: BaseModel, head: StoredHead, output: Path
) -> dict[str, Any]:
    """Convert a head and return what to report; with `verify`, whether it decodes as before.

    Nothing is at `output` unless everything went well. Raises UserError for what cannot be done.
    """
    report = {
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

    # Written beside its place, and moved there once it has decoded as the source does.
    prompts = verification_prompts(base, head, options.prompts, options.num_prompts)
    with scratch_directory(output) as scratch:
        staged = scratch / "head"
        write_head(staged, head, options.to, base, options.input)
        # The written head is opened like any other, through the same checks.
        result = open_head(str(staged), base, allow_base_mismatch=options.spec.allow_base_mismatch)
        verification = verify(load(options.spec), head, result, prompts, options.max_new_tokens)
        report |= {"bytes": _num_bytes(staged)} | dataclasses.asdict(verification)
        if verification.differing:
            return report | {"output": None}
        put_in_place(staged, output)
    return report


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_head(output: Path, head: StoredHead, to: str, base: BaseModel, source: str) -> None:
    """Write a head in the layout `to`."""
    if to == NATIVE:
        # Its provenance stays, so that data and figures travel with it.
        provenance = head.card.provenance | {"converted_from": source}
        write_native(output, head, dataclasses.replace(head.card, provenance=provenance))
        return
    layout = layout_for(to, head.config.kind)
    write_foreign(output, head, layout, base)
    say(layout.warning)


def _check_output(output: Path, options: ConvertOptions, base: BaseModel) -> None:
    # A folder that is read must not be replaced, nor one that it lies in.
    source = Path(options.input).expanduser()
    head = native_directory(source) or source  # of a workdir, the head in it
    read = {"input": (source, head), "base": (base.directory,)}
    for name, folders in read.items():
        if any(folder.resolve().is_relative_to(output.resolve()) for folder in folders):
            raise UserError(
                f"--output={options.output} is or holds the {name}; give another folder"
            )
    check_replaceable(output, options.overwrite, "draft head", _is_head)


def _is_head(folder: Path) -> bool:
    # A base has a config.json too, and must not be replaced.
    if (folder / CARD).is_file():
        return True
    try:
        recognise(folder)
    except UserError:
        return False
    return True
