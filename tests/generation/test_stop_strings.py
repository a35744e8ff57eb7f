"""Stop strings cut at the same place however the tokens come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.generation.stop_strings import StopCut, find_stop, settled_length

# Tokens 0 to 9 as a tokenizer might have them: of one letter, of several, of none.
WORDS = ["a", "b", "-", "--", "a-", "-b", "", "ab", "b--a", "c"]


def decode(ids):
    return "".join(WORDS[id_] for id_ in ids)


def test_the_examples():
    assert find_stop("".join, list("a-b--c"), ["--"]) == StopCut(3, "a-b")
    assert settled_length("so\n", ["\n\n"]) == 2
    assert settled_length("so\n\nbe", ["\n\n"]) == 2


@pytest.mark.parametrize(
    ("ids", "stops", "expected"),
    [
        ([0, 9], ["--"], None),
        ([0, 3, 9], ["--"], StopCut(1, "a")),
        ([4, 5], ["--"], StopCut(0, "a")),  # the first token holds half of the stop string
        ([0, 8, 9], ["--"], StopCut(1, "ab")),  # one token holds it and text before it
        ([0, 1, 6, 9, 2], ["b", "a"], StopCut(0, "")),
        ([0, 7], ["bc", "ab"], StopCut(1, "a")),
        ([0, 6, 9], ["c"], StopCut(2, "a")),
    ],
)
def test_tokens_before_the_stop_string_are_kept(ids, stops, expected):
    assert find_stop(decode, ids, stops) == expected


@given(ids=st.lists(st.integers(0, 9), max_size=12), chunk=st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_the_cut_does_not_depend_on_how_many_tokens_come_at_a_time(ids, chunk):
    stops = ["--", "ab-"]
    found, num_clean = None, 0
    while found is None and num_clean < len(ids):
        end = min(num_clean + chunk, len(ids))
        found = find_stop(decode, ids[:end], stops, num_clean)
        num_clean = end
    assert found == find_stop(decode, ids, stops)
    if found:
        whole = decode(ids)
        assert found.text == whole[: min(i for s in stops if (i := whole.find(s)) >= 0)]


@given(text=st.text("ab-", max_size=8), rest=st.text("ab-", max_size=6))
@settings(deadline=None, derandomize=True)
def test_what_is_settled_survives_whatever_follows(text, rest):
    stops = ["--", "ab-"]
    whole = text + rest
    cut = min((i for stop in stops if (i := whole.find(stop)) >= 0), default=len(whole))
    assert settled_length(text, stops) <= cut
    assert settled_length(text, []) == len(text)
