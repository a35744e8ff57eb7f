"""The library for notebooks and programs: load a base, train and load a draft, generate.

    from clover_jax import api

    models = api.load_base("builtin:tiny")
    for piece in api.generate(models, "def area(", max_new_tokens=16):
        print(piece.text, end="")
    print(f"\\n{piece.tokens} tokens, {piece.finish_reason}")

A draft gives the same text in fewer forward passes of the base. Each piece reports how many tokens
were drafted for it, and how many of them the base accepted:

    api.train("runs/clover2", steps=1000, data="builtin:python")
    models = api.load_draft(models, "runs/clover2")
    for piece in api.generate(models, "def area(", max_new_tokens=16):
        print(f"{piece.text!r}: {piece.accepted} of {piece.drafted} drafted tokens accepted")
    print(f"{piece.tokens} tokens in {piece.forwards} forwards, tau {piece.tau:.2f}")

`generate_rows` decodes many prompts at once, into the same rows as the command. The commands call
the same functions and add files, resuming and progress. A user's mistake raises `UserError`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from clover_jax import convert as convert_command
from clover_jax import evaluate as evaluate_command
from clover_jax import prepare as prepare_command
from clover_jax.checkpoints.quantization import parse_parts
from clover_jax.cli.command_flags import flags_of
from clover_jax.data.prompts import BadPrompt, Prompt, parse_prompt
from clover_jax.decoding.models import Models, load
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_stream import open_stream
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import check_settings
from clover_jax.models.meshes import mesh_for
from clover_jax.training.run import run_training
from clover_jax.training.sampler import Sampler, Samples
from clover_jax.training.settings import TrainSettings

__all__ = [
    "GenerationSettings",
    "Models",
    "Piece",
    "Sampler",
    "Samples",
    "TrainSettings",
    "UserError",
    "convert",
    "evaluate",
    "generate",
    "generate_rows",
    "load_base",
    "load_draft",
    "prepare",
    "train",
]

Settings = TypeVar("Settings", GenerationSettings, TrainSettings)
PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A new piece of a text, and the figures of the whole text so far.

    text: the new text; "" while it may still change, or without a tokenizer.
    ids: the new tokens. A stop string may remove tokens of earlier pieces.
    tokens: tokens so far. forwards: forward passes of the base after the prompt's own.
    tau: tokens per forward pass, without the first token; None before the first pass.
    finish_reason: "eos", "stop" or "length" in the last piece, else None.
    drafted, accepted: tokens drafted in the forward passes of this piece, and accepted ones.
    """

    text: str
    ids: list[int]
    tokens: int
    forwards: int
    tau: float | None
    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0


def load_base(
    source: str | Path = "builtin:tiny",
    dtype: str = "auto",
    mesh: str | None = None,
    int8: Sequence[str] = (),
    chat_template: str | None = None,
) -> Models:
    """Load a base and its tokenizer, for plain decoding.

    source: a Hugging Face folder, a GGUF file, a hub id (`owner/name@revision`), "builtin:tiny",
        or "shape:NAME" for random weights.
    dtype: "float32", "bfloat16" or "auto", which is float32 on CPU and bfloat16 elsewhere.
    mesh: the devices to decode on, such as "tensor=4"; None is one device.
    int8: the models to quantize to 8 bits: "draft", which does not change the text, or "base".
    chat_template: a Jinja file, or "vicuna" or "baichuan2"; None is the base's own.
    """
    parts = parse_parts(int8 or ())
    template = None if chat_template is None else str(chat_template)
    spec = ModelSpec(str(source), dtype=str(dtype), mesh=mesh, int8=parts, chat_template=template)
    check_settings(spec)
    return load(spec)


def load_draft(
    models: Models,
    source: str | Path,
    tree: str | None = None,
    *,
    copy: int = 0,
    copy_from: str | Path | None = None,
    allow_base_mismatch: bool = False,
    draft_rope_theta: float | None = None,
) -> Models:
    """Return models that share the base and decode with a draft.

    source: a draft directory, a training workdir, a folder or hub id in an official layout, or
        "lookup" or "recycle", which draft from the text and need no file.
    tree: as for `generate --tree`, except "auto"; by default the draft's own, else its kind's.
    copy: nodes for copies, in addition to the tree's own nodes.
    copy_from: a text file that copies may come from too.
    """
    # The base is not loaded again.
    spec = ModelSpec(
        draft=str(source),
        tree=tree,
        copy=_plain(copy),
        copy_from=None if copy_from is None else str(copy_from),
        allow_base_mismatch=allow_base_mismatch,
        draft_rope_theta=_plain(draft_rope_theta),
    )
    check_settings(spec)
    return load(spec, models.plain())


def generate(
    models: Models, prompt: PromptLike, *, seed: int = 0, **settings: Any
) -> Iterator[Piece]:
    """Decode one prompt and yield its text piece by piece.

    prompt: text, token ids, or messages ({"role", "content"}) for the chat template.
    settings: fields of `GenerationSettings`: max_new_tokens, temperature, top_k, top_p, stop, ...
    A second call with the same models and kind of settings compiles nothing.
    """
    row = as_prompt(prompt)
    chosen = _chosen(GenerationSettings, settings)
    stream = open_stream(models, [row], chosen, seed=_plain(seed), strict=True, is_watched=True)
    before = 0  # forward passes of the turn that earlier pieces have reported
    for event in stream:
        if event.progress is None:
            raise UserError((event.row or {})["skipped"])
        turn, new = event.progress.turn, event.progress.pieces
        yield Piece(
            # An event may bring several forward passes.
            text="".join(piece.text for piece in new),
            ids=[id_ for piece in new for id_ in piece.ids],
            tokens=len(turn.output_ids),
            forwards=turn.target_forwards,
            tau=turn.tau,
            finish_reason=turn.finish_reason,
            drafted=sum(event.progress.generation.proposed[before : turn.target_forwards]),
            accepted=sum(turn.accepted[before:]),
        )
        before = 0 if event.progress.ended else turn.target_forwards


def generate_rows(
    models: Models,
    prompts: Iterable[PromptLike | Mapping[str, Any]],
    *,
    batch_size: int = 8,
    seed: int = 0,
    strict: bool = True,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """Decode many prompts, `batch_size` at once, and yield the output row of each when it ends.

    prompts: as for `generate`, or rows as in the command's files ({"turns": [...]}, ...).
    strict: raise the UserError of a prompt that cannot be decoded; else yield it as a row,
        {"index": 4, "error": "..."}, as the command does.
    Yields the rows of `generate --output`: index (of the prompt), output_ids, text, tau, ...
    """
    # A text is iterable too and would be decoded letter by letter.
    if isinstance(prompts, str | bytes | Mapping):
        raise UserError(f"prompts must be several, not {prompts!r}; give [{prompts!r}] for one")
    rows: list[Prompt | BadPrompt] = []
    for index, prompt in enumerate(prompts):
        try:
            rows.append(as_prompt(prompt, index))
        except UserError as error:
            # A row in its place keeps the indices of later rows right.
            if strict:
                raise
            rows.append(BadPrompt(index, f"prompt {index}", str(error)))
    chosen = _chosen(GenerationSettings, settings)
    batch_size, seed = _plain(batch_size), _plain(seed)
    stream = open_stream(models, rows, chosen, batch_size=batch_size, seed=seed, strict=strict)
    # Events without a row report the progress of unfinished rows.
    yield from (event.row for event in stream if event.row is not None)


def train(
    workdir: str | Path,
    *,
    stop: threading.Event | None = None,
    mesh: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a draft head in `workdir`, or resume an earlier call; return the report.

    stop: when set, the run saves a checkpoint after its current step and returns.
    mesh: the devices to train on, such as "data=2,fsdp=-1"; None is one device.
    settings: fields of `TrainSettings`, which are the flags of `python -m clover_jax.train`.
    """
    chosen = _chosen(TrainSettings, settings)
    stop = stop or threading.Event()
    return run_training(chosen, Path(workdir).expanduser(), stop, mesh_for(mesh))


def evaluate(
    output: str | Path, drafts: Mapping[str, str | Path] | None = None, **settings: Any
) -> dict[str, Any]:
    """Measure drafts against plain decoding and return the key figures of the report in `output`.

    drafts: name in the report -> draft, as for `load_draft`; None measures the baselines only.
    settings: the flags of `python -m clover_jax.evaluate`: base, prompts, repeats, ...
    """
    named = ",".join(f"{name}={source}" for name, source in (drafts or {}).items())
    return _execute(evaluate_command, settings, output=output, drafts=named or None)


def prepare(output: str | Path, **settings: Any) -> dict[str, Any]:
    """Write training samples, activations or new answers to `output`; return the counts.

    settings: the flags of `python -m clover_jax.prepare`: data, base, seq_len, features, ...
    """
    return _execute(prepare_command, settings, output=output)


def convert(input: str | Path, output: str | Path, **settings: Any) -> dict[str, Any]:
    """Write the head at `input` to `output` in the layout `to`; return the report.

    settings: the flags of `python -m clover_jax.convert`: base, to, verify, ...
    """
    return _execute(convert_command, settings, input=input, output=output)


def as_prompt(prompt: PromptLike | Mapping[str, Any], index: int = 0) -> Prompt:
    """Return the prompt row of text, token ids, messages or a row."""
    prompt = _plain(prompt)
    # Mappings and text first, since they are iterable too.
    if isinstance(prompt, Mapping):
        row = prompt
    elif isinstance(prompt, str):
        row = {"prompt": prompt}
    elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise UserError(
            f"prompt {index} must be text, token ids, messages or a row, not {prompt!r}"
        )
    else:
        listed = list(prompt)
        of_messages = bool(listed) and isinstance(listed[0], Mapping)
        row = {"messages": listed} if of_messages else {"prompt_ids": _plain(listed)}
    return parse_prompt(row, index=index, source=f"prompt {index}")


def _plain(value: Any) -> Any:
    """Return numpy's and jax's values, tuples and mappings as lists, dicts and plain numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _chosen(kind: type[Settings], given: dict[str, Any]) -> Settings:
    """Return settings of a kind; raises UserError with a list of its fields for an unknown name."""
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UserError(f"{unknown[0]!r} is not a setting; the settings are {', '.join(known)}")
    # A number may come from numpy or jax.
    plain = {name: v.tolist() if hasattr(v, "tolist") else v for name, v in given.items()}
    return kind(**plain)


def _execute(command: ModuleType, settings: dict[str, Any], **named: Any) -> dict[str, Any]:
    given = {name: v.tolist() if hasattr(v, "tolist") else v for name, v in settings.items()}
    return command.execute(flags_of(command.define_flags, named | given))
