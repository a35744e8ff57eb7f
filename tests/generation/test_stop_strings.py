"""Stop strings cut at the same place however the tokens come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.generation.stop_strings import StopCut, StopSearch, find_stop, settled_length

# Tokens 0 to 9 as a tokenizer might have them: of one letter, of several, of none.
WORDS = ["a", "b", "-", "--", "a-", "-b", "", "ab", "b--a", "c"]


class Words:
    """Text that every token settles."""

    def push(self, ids):
        return decode(ids)

    def finish(self):
        return ""


class Letters(Words):
    """The same of tokens that are letters."""

    def push(self, ids):
        return "".join(ids)


class Pairs(Words):
    """The same, which settles two tokens at a time: words that are alone turn to "?"."""

    def __init__(self):
        self._held = []

    def push(self, ids):
        held = [*self._held, *ids]
        end = len(held) // 2 * 2
        self._held = held[end:]
        return decode(held[:end])

    def finish(self):
        return "?" * len(self._held)


def decode(ids):
    return "".join(WORDS[id_] for id_ in ids)


def test_the_examples():
    assert find_stop(Letters, list("a-b--c"), ["--"]) == StopCut(3, "a-b")
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
    assert find_stop(Words, ids, stops) == expected


@pytest.mark.parametrize("pieces", [Words, Pairs])
@given(ids=st.lists(st.integers(0, 9), max_size=12), chunk=st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_the_cut_does_not_depend_on_how_many_tokens_come_at_a_time(pieces, ids, chunk):
    stops = ["--", "ab-", "?"]
    search, found, end = StopSearch(stops, pieces), None, 0
    while found is None and end < len(ids):
        end = min(end + chunk, len(ids))
        found = search.take(ids[:end], ended=end == len(ids))
    assert found == find_stop(pieces, ids, stops)
    if found:
        whole = pieces()
        text = whole.push(ids) + whole.finish()
        assert found.text == text[: min(i for s in stops if (i := text.find(s)) >= 0)]


@given(text=st.text("ab-", max_size=8), rest=st.text("ab-", max_size=6))
@settings(deadline=None, derandomize=True)
def test_what_is_settled_survives_whatever_follows(text, rest):
    stops = ["--", "ab-"]
    whole = text + rest
    cut = min((i for stop in stops if (i := whole.find(stop)) >= 0), default=len(whole))
    assert settled_length(text, stops) <= cut
    assert settled_length(text, []) == len(text)
