"""The legs of a trial: the same prompts decoded by several models, with a tree or plainly."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling import SamplingConfig, Warping
from clover_jax.loading.models import Models
from clover_jax.tree_search.tree_trial import Leg, Trial, run_in_turns


def measure_trials(
    ways: Sequence[Models],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: SamplingConfig,
    warping: Warping,
    batch_size: int,
) -> list[Trial]:
    """Decode all prompts in every way, in turns; rows emit so many tokens whatever they are."""
    requests = [
        Request(index, prompt, new_tokens, **warping.to_dict())
        for index, prompt in enumerate(prompts)
    ]
    legs = [functools.partial(_run, models, requests, sampling, batch_size) for models in ways]
    return run_in_turns(legs)


def _run(
    models: Models, requests: Sequence[Request], sampling: SamplingConfig, batch_size: int
) -> Leg:
    engine = models.engine(min(batch_size, len(requests)), sampling)
    tokens = forwards = 0
    for progress in engine.stream(models.base.params, models.draft_params, requests):
        if progress.done:
            tokens += len(progress.row.output_ids) - 1
            forwards += progress.row.target_forwards
    return Leg(tokens, forwards)
