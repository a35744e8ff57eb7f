"""Requests: the rules of sampling that they lead to; the tally of their results."""

import itertools

from clover_jax.decoding.requests import Request, least_sampling, requests_of_every_kind
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams

MOST = SamplingConfig("lossless", truncate=True, biased=True)  # as a server has it
CHANGES = (
    *({"params": SamplingParams(**params)} for params in ({"temperature": 1.0}, {"top_k": 5})),
    {"params": SamplingParams(temperature=1.0, top_k=5)},
    {"params": SamplingParams(temperature=1.0, top_p=0.5)},
    {"wants_scores": True},
    {"wants_prompt_scores": True},
    {"min_new_tokens": 1},
    {"logit_bias": ((3, 1.0),)},
)


def test_there_is_a_request_of_every_kind_that_a_batch_can_be_of():
    kinds = {least_sampling(MOST, [request]) for request in requests_of_every_kind(4)}
    asked = [
        Request(0, [0], 2, **dict(itertools.chain.from_iterable(c.items() for c in changes)))
        for count in range(len(CHANGES) + 1)
        for changes in itertools.combinations(CHANGES, count)
    ]
    alone = {least_sampling(MOST, [request]) for request in asked}
    beside = {least_sampling(MOST, pair) for pair in itertools.combinations(asked, 2)}
    assert alone | beside == kinds
