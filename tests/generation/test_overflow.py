"""A prompt beyond the context: refused, cut on the left or left out."""

import dataclasses

import pytest

from clover_jax.errors import UserError
from clover_jax.generation.row_state import Skipped, fit_context
from clover_jax.generation.settings import GenerationSettings
from tests.tiny_models import TINY

BASE = dataclasses.replace(TINY, max_position_embeddings=16, bos_token_id=0)


def fit(ids, policy, max_new_tokens=4):
    settings = GenerationSettings(max_new_tokens=max_new_tokens, context_overflow=policy)
    return fit_context(ids, BASE, settings, "p.jsonl:1")


@pytest.mark.parametrize("policy", ["error", "truncate_left", "skip"])
def test_a_prompt_that_leaves_room_for_a_token_stays(policy):
    assert fit(list(range(15)), policy) == list(range(15))


def test_a_longer_one_is_refused_or_left_out_with_the_numbers():
    said = "p.jsonl:1: the prompt has 16 tokens and the base's context is 16"
    with pytest.raises(UserError, match=f"{said}; shorten it, or give --context_overflow"):
        fit([1] * 16, "error")
    with pytest.raises(Skipped, match=f"{said}$"):
        fit([1] * 16, "skip")


@pytest.mark.parametrize(("max_new_tokens", "kept"), [(4, 12), (1, 15), (8, 8), (100, 8)])
def test_the_end_is_kept_and_room_made(max_new_tokens, kept):
    ids = list(range(1, 31))
    assert fit(ids, "truncate_left", max_new_tokens) == ids[-kept:]
    assert fit([0, *ids], "truncate_left", max_new_tokens) == [0, *ids[-(kept - 1) :]]
