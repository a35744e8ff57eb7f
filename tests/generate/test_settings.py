"""A row's own settings take the place of the command's."""

import pytest

from clover_jax.data.prompts import parse_prompt
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.errors import UserError


def row(**options):
    return parse_prompt({"prompt": "a", **options}, 0, "p.jsonl:1")


def test_a_row_s_own_settings_win():
    settings = GenerationSettings(max_new_tokens=5, stop=("x",), ignore_eos=True)
    assert settings.for_row(row()) == settings
    own = settings.for_row(row(max_new_tokens=9, stop="y", temperature=0))
    assert (own.max_new_tokens, own.stop, own.ignore_eos) == (9, ("y",), True)


def test_a_row_that_wants_what_cannot_be_is_named():
    with pytest.raises(UserError, match=r"p\.jsonl:1: temperature 0\.7 asks for sampling"):
        GenerationSettings(verify="greedy").for_row(row(temperature=0.7))


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({}, {}, SamplingConfig("greedy")),
        ({}, {"temperature": 0.5}, SamplingConfig("lossless")),
        ({"temperature": 1.0}, {"top_k": 3}, SamplingConfig("lossless", truncate=True)),
        (
            {"temperature": 1.0, "draft_sampling": "sampled"},
            {},
            SamplingConfig("lossless", "sampled"),
        ),
        ({"draft_sampling": "sampled"}, {}, SamplingConfig("lossless", "sampled")),
        ({"verify": "typical"}, {"temperature": 0.5}, SamplingConfig("typical")),
    ],
)
def test_the_engine_does_what_some_row_needs_and_no_more(settings, options, expected):
    assert sampling_for(GenerationSettings(**settings), [row(**options)]) == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens \(0\) must be at least 1"),
        ({"verify": "greedy", "temperature": 1.0}, "which verify=greedy does not do"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"seed": 1.5}, "seed must be a whole number or None, not 1.5"),
        ({"stop": 0}, "stop must be text or several of them or None, not 0"),
        ({"stop": 5}, "stop must be text or several of them or None, not 5"),
        ({"stop": ["a", 5]}, r"stop must be strings, not \('a', 5\)"),
        ({"stop": ("",)}, "a stop string is empty"),
        (
            {"context_overflow": "nope"},
            "context_overflow 'nope' is not one of error, ",
        ),
        ({"temperature": 1e39}, r"temperature \(1e\+39\) must be 3\.40282e\+38 or less"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be 0 or more"),
        ({"top_k": -1}, r"top_k \(-1\) must be 1 or more, or 0 for all tokens"),
        ({"top_p": 0.0}, r"top_p \(0.0\) must lie in \(0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused(values, said):
    with pytest.raises(UserError, match=said):
        GenerationSettings(**values)


@pytest.mark.parametrize("stop", ["a", ["a"], ("a",)])
def test_one_stop_string_may_be_given_as_such(stop):
    assert GenerationSettings(stop=stop).stop == ("a",)
    assert GenerationSettings(stop=None).stop == ()
