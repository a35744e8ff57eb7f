"""Show which tokens the base is imitated on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TextIO

from clover_jax.data.chat import Encoded
from clover_jax.data.samples import RecordSamples
from clover_jax.decoding.output import wants_color

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COUNTED, _REST, _RESET = "\033[32m", "\033[2m", "\033[0m"
# Where there are no colours; no chat template has these.
_OPEN, _CLOSE = "⟦", "⟧"


def show_samples(
    samples: RecordSamples, count: int, tokenizer: PreTrainedTokenizerBase | None, file: TextIO
) -> None:
    """Write some samples, spread evenly: what counts in green, or in brackets on no terminal."""
    in_colour = wants_color(file)
    marks = "in green" if in_colour else f"between {_OPEN} and {_CLOSE}"
    # Rounded up, so that no more are shown than were asked for.
    for index in range(0, len(samples), max(1, -(-len(samples) // count))):
        sample = samples[index]
        source, size = samples.sections[index].source, len(sample.tokens)
        file.write(f"== {source}: {size} tokens, {sample.loss_mask.sum()} to learn, {marks}\n")
        file.write(f"{marked_text(sample, tokenizer, in_colour)}\n")
    file.flush()


def marked_text(sample: Encoded, tokenizer: PreTrainedTokenizerBase | None, in_colour: bool) -> str:
    """Return a sample's text, special tokens included, with what counts marked."""
    # Each run of tokens with the same mask is decoded as one part.
    parts, end = [], 0
    for counts, run in itertools.groupby(sample.loss_mask.tolist()):
        start, end = end, end + len(list(run))
        text = _text_between(sample, tokenizer, start, end)
        if in_colour:
            parts.append(f"{_COUNTED if counts else _REST}{text}{_RESET}")
        else:
            parts.append(f"{_OPEN}{text}{_CLOSE}" if counts else text)
    return "".join(parts)


def _text_between(
    sample: Encoded, tokenizer: PreTrainedTokenizerBase | None, start: int, end: int
) -> str:
    # Without words, the ids themselves.
    if tokenizer is None:
        return "".join(f"{token} " for token in sample.tokens[start:end])
    # Decoders look at neighbours, so a part is what it adds to the whole.
    decoded = [str(tokenizer.decode(sample.tokens[:stop].tolist())) for stop in (start, end)]
    return decoded[1][len(decoded[0]) :]
