"""Give a head a reduced vocabulary: the most frequent tokens of what it is trained on."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, NamedTuple

from clover_jax.data.samples import Samples
from clover_jax.data.token_counts import count_tokens, most_frequent
from clover_jax.drafters import registry
from clover_jax.drafters.registry import DraftHead
from clover_jax.pretrained.base import BaseModel
from clover_jax.runtime.progress import passing_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReducedHead(NamedTuple):
    """A head with a reduced vocabulary.

    coverage: share of the training data's tokens that it can propose.
    """

    head: DraftHead
    coverage: float


def reduce_vocabulary(
    head: DraftHead,
    size: int,
    base: BaseModel,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: Samples,
) -> ReducedHead:
    """Return the head over the `size` most frequent tokens, and say how much they cover.

    Special tokens and those that end a text are always among them: they are rare, and a text that
    cannot be drafted to its end costs a forward more.
    Raises UserError for a size that cannot be.
    """
    vocab_size = base.config.vocab_size
    with passing_note("counting the tokens of the training data"):
        counts = count_tokens(samples, vocab_size)
    special = set(base.config.eos_token_ids) | set(tokenizer.all_special_ids if tokenizer else ())
    vocabulary = most_frequent(counts, size, (token for token in special if token < vocab_size))
    print(
        f"draft vocabulary: {size} of {vocab_size} tokens, "
        f"{vocabulary.coverage:.2%} of the training data's",
        file=sys.stderr,
        flush=True,
    )
    config = dataclasses.replace(head.config, draft_to_target=vocabulary.ids)
    return ReducedHead(registry.head(config), vocabulary.coverage)
