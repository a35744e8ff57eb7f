"""The card of a base made by `pretrain`: what it is, from what, by which command, how good."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from clover_jax.config import BaseConfig

CARD_FILE = "README.md"
# Every card says so, those of earlier versions too: by this a base made here is known.
_MADE_HERE = "made by `experiments.tiny_base.pretrain`"
_CARD = """\
# A small base model for Python

A Llama-style decoder of {parameters:,} parameters, {made_here}. It knows
the style of its sources and little else: it is here so that speculative decoding can be tried,
trained for and tested without a network. Weights are bfloat16 in safetensors.

## Data

Source: {source}, its test suite included where there is one.

| split | modules | UTF-8 bytes |
| --- | --- | --- |
| training | {train_modules:,} | {train_bytes:,} |
| held out | {heldout_modules:,} | {heldout_bytes:,} |

Modules are held out by a hash of their path (`clover_jax/data/corpus.py`). Left out: generated
tables, encodings, files that are not UTF-8 or do not parse. The tokenizer, a byte-level BPE of
{vocab_size:,} tokens, was trained on the training modules. `prompts.jsonl` holds function heads of
the held-out modules: {num_prompts} rows.

## Command

    {command}

on {device} with Python {python},
{versions}. {time_note}

## Figures

| figure | value |
| --- | --- |
| bits per byte, held-out modules | {bits_per_byte} |
| nats per token, held-out modules | {nats_per_token} |
| bytes per token, held-out modules | {bytes_per_token} |
| tokens read | {tokens_read:,} ({epochs} epochs, {steps:,} steps) |
| training time | {minutes} minutes |

Measured after rounding to bfloat16, in float32 arithmetic, over all held-out modules: total
cross-entropy / ln 2 / UTF-8 bytes. Each module is cut into consecutive windows of {context}
tokens that share no context; each window starts from the BOS token.

## Shape

{num_layers} layers, width {hidden_size}, MLP width {intermediate_size}, {num_heads} query and
{num_kv_heads} key/value heads of {head_dim}, tied embeddings, rotary base {theta:g},
context {context}.

## License of the data

The standard library comes under the PSF license. No module is stored here; the prompts are short
excerpts.
"""

_BY_STEPS = "The seed fixes the batches and the schedule."
_BY_TIME = (
    "The seed fixes the\nbatches; the schedule followed a time budget while the machine "
    "also did other work, so another\nrun gives other weights of similar quality."
)


class CorpusFigures(NamedTuple):
    """Where the documents came from, and modules and UTF-8 bytes of each split."""

    source: str
    train_modules: int
    train_bytes: int
    heldout_modules: int
    heldout_bytes: int


def is_made_here(folder: Path) -> bool:
    """Return whether a folder is a base that `pretrain` made, by its card."""
    card = folder / CARD_FILE
    return card.is_file() and _MADE_HERE in card.read_text(encoding="utf-8", errors="replace")


def card_text(
    base: BaseConfig,
    corpus: CorpusFigures,
    settings: Mapping[str, Any],
    figures: Mapping[str, Any],
    num_prompts: int,
) -> str:
    """Return the text of README.md.

    settings: the command's flags. figures: what the command reports.
    """
    packages = ("jax", "flax", "optax", "tokenizers")
    return _CARD.format(
        **figures | corpus._asdict(),
        made_here=_MADE_HERE,
        vocab_size=base.vocab_size,
        num_prompts=num_prompts,
        command=_command(settings),
        device=f"{jax.device_count()} {jax.devices()[0].device_kind} device(s)",
        python=platform.python_version(),
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        time_note=_BY_TIME if settings.get("minutes") else _BY_STEPS,
        context=base.max_position_embeddings,
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        theta=base.rope.theta,
    )


def _command(settings: Mapping[str, Any]) -> str:
    """Return the command with every flag that has a value."""
    values = {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if value not in (None, [])
    }
    flags = [f"--{name}={value}" for name, value in values.items()]
    return " \\\n        ".join(["python -m experiments.tiny_base.pretrain", *flags])
