"""The head that a run's settings describe: its kind, its options, its vocabulary."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.config import LossSpec, RopeConfig
from clover_jax.data.samples import Samples
from clover_jax.drafters import registry
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.field_types import parse_values
from clover_jax.runtime.progress import passing_note, say
from clover_jax.training.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_head(settings: TrainSettings, base: BaseModel) -> DraftHead:
    """Return the head that the settings describe, without params.

    Raises UserError for a setting that this kind of drafter does not have or cannot take.
    """
    if settings.drafter in registry.TRAINING_FREE:
        raise UserError(
            f"--drafter={settings.drafter} has nothing to train; decode with "
            f"--draft={settings.drafter} at once"
        )
    text = settings.drafter_options or ""
    options = registry.parse_options("--drafter_options=", text, settings.drafter)
    # Two options are common enough to have flags of their own.
    for name in ("num_positions", "num_augmenting_layers"):
        if getattr(settings, name) is not None:
            if name in options:
                raise UserError(f"give --{name} or {name} in --drafter_options, not both")
            options[name] = getattr(settings, name)
    if settings.draft_rope_theta is not None:
        options["rope"] = RopeConfig(theta=settings.draft_rope_theta)

    # The config finds a wrong value but knows no flags, so its message gets the flag here.
    try:
        config = registry.config_for_base(settings.drafter, base.config, **options)
    except UserError as error:
        raise UserError(f"--drafter={settings.drafter}: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return registry.head(dataclasses.replace(config, loss=make_loss(settings.loss, config.loss)))


def make_loss(text: str | None, default: LossSpec) -> LossSpec:
    """Return the method's loss, changed by --loss.

    Raises UserError for an unknown part or a bad value.
    """
    known = typing.get_type_hints(LossSpec)
    options = parse_values("--loss=", text or "", known, "the loss has no part")
    # D-PACE computes the weights of positions itself.
    dpace = options.get("dpace", default.dpace)
    if "decay" in options and dpace:
        raise UserError(
            f"--loss={text}: decay ({options['decay']}) has no effect with dpace ({dpace}); add "
            "dpace=0"
        )
    try:
        return dataclasses.replace(default, **options)
    except ValueError as error:
        raise UserError(f"--loss={text}: {error}") from error


def reduce_vocabulary(
    head: DraftHead,
    size: int,
    base: BaseModel,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: Samples,
) -> tuple[DraftHead, float]:
    """Return the head over the `size` most frequent tokens, and their share of the data; print it.

    Special tokens and those that end a text are always among them: they are rare, and a text that
    cannot be drafted to its end costs a forward more.
    Raises UserError for an impossible size.
    """
    vocab_size = base.config.vocab_size
    with passing_note("counting the tokens of the training data"):
        counts = count_tokens(samples, vocab_size)

    special = set(base.config.eos_token_ids) | set(tokenizer.all_special_ids if tokenizer else ())
    # A tokenizer may know tokens that the base has no row for.
    vocabulary = most_frequent(counts, size, (token for token in special if token < vocab_size))
    say(
        f"draft vocabulary: {size} of {vocab_size} tokens, {vocabulary.coverage:.2%} of the "
        "training data's"
    )
    # The ids fix the shapes of every program of the head, so they are part of its config.
    config = dataclasses.replace(head.config, draft_to_target=vocabulary.ids)
    return registry.head(config), vocabulary.coverage


class DraftVocabulary(NamedTuple):
    """A part of the base's vocabulary.

    ids: ascending.
    coverage: the share of the counted tokens that it includes.
    """

    ids: tuple[int, ...]
    coverage: float


def count_tokens(samples: Samples, vocab_size: int) -> np.ndarray:
    """Return [vocab_size] how often each token is one that the base is imitated on."""
    counts = np.zeros(vocab_size, np.int64)
    for index in range(len(samples)):
        sample = samples[index]
        counts += np.bincount(sample.tokens[sample.loss_mask], minlength=vocab_size)
    return counts


def most_frequent(counts: np.ndarray, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """Return the `size` most frequent tokens; `always` are among them however rare.

    Among equally frequent ones the lower id comes first.
    Raises UserError for a size that cannot be.

    Example: counts [5, 0, 3, 0, 9], size 3, always [1] give ids (0, 1, 4).
    """
    wanted = sorted(set(always))
    if not max(len(wanted), 1) <= size <= len(counts):
        raise UserError(
            f"--draft_vocab={size} must lie between {max(len(wanted), 1)} (the special tokens) "
            f"and {len(counts)}, the base's vocabulary"
        )

    # Stable, so that ties go by id on every machine.
    rank = np.argsort(-counts, kind="stable")
    others = rank[~np.isin(rank, wanted)][: size - len(wanted)]
    ids = np.sort(np.concatenate([np.array(wanted, np.int64), others]))
    # Without a counted token the coverage is 0.
    coverage = counts[ids].sum() / max(counts.sum(), 1)
    return DraftVocabulary(tuple(ids.tolist()), float(coverage))
