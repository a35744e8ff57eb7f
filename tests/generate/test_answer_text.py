"""Stop strings cut at the same place however the tokens come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding.row_state import AnswerText, StopCut, find_stop, settled_length

# Tokens 0 to 9 as a tokenizer might have them: of one letter, of several, of none.
WORDS = ["a", "b", "-", "--", "a-", "-b", "", "ab", "b--a", "c"]


class Words:
    """Text that every token settles."""

    def push(self, ids):
        return decode(ids)

    def held(self):
        return ""

    def holds_back(self, ids):
        return False


class Letters(Words):
    """The same of tokens that are letters."""

    def push(self, ids):
        return "".join(ids)


class Runs(Words):
    """Text in which another token ends runs of tokens 2 to 5; token 9 makes them "?" each."""

    def __init__(self):
        self._run = []

    def push(self, ids):
        text = ""
        for id_ in ids:
            if 2 <= id_ <= 5:
                self._run.append(id_)
                continue
            text += ("?" * len(self._run) if id_ == 9 else decode(self._run)) + decode([id_])
            self._run = []
        return text

    def held(self):
        return decode(self._run)

    def holds_back(self, ids):
        return any(2 <= id_ <= 5 for id_ in ids)


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


@pytest.mark.parametrize("pieces", [Words, Runs])
@given(ids=st.lists(st.integers(0, 9), max_size=12), chunk=st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_the_cut_does_not_depend_on_how_many_tokens_come_at_a_time(pieces, ids, chunk):
    stops = ["--", "ab-", "?"]
    search, found, end = AnswerText(stops, pieces), None, 0
    while found is None and end < len(ids):
        end = min(end + chunk, len(ids))
        found = search.take(ids[:end])
    assert found == find_stop(pieces, ids, stops)
    if found and pieces is Words:
        text = decode(ids)
        assert found.text == text[: min(i for s in stops if (i := text.find(s)) >= 0)]


def test_a_stop_string_in_a_run_is_found_before_the_run_ends():
    search = AnswerText(["--"], Runs)
    assert search.take([0]) is None
    assert search.take([0, 3]) == StopCut(1, "a")
    assert AnswerText(["--"], Runs).take([0, 3, 9]) == StopCut(1, "a")  # which "c" would undo


def test_without_stop_strings_a_run_is_not_read_before_its_end(monkeypatch):
    monkeypatch.setattr(Runs, "held", lambda _: pytest.fail("read"))
    search = AnswerText([], Runs)
    assert search.take([0, 3]) is None
    assert (search.settled(), search.is_settled) == ("a", True)


class Incomplete(Words):
    """Text in which token 9 is half of a character, and two of them are "é"."""

    def __init__(self):
        self._text, self._num_given = "", 0

    def push(self, ids):
        self._text += "".join("\ufffd" if id_ == 9 else WORDS[id_] for id_ in ids)
        self._text = self._text.replace("\ufffd\ufffd", "é")
        settled = self._text.rstrip("\ufffd")
        piece, self._num_given = settled[self._num_given :], max(len(settled), self._num_given)
        return piece

    def held(self):
        return self._text[self._num_given :]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_a_replacement_character_stops_a_text_where_no_token_can_complete_it(chunk):
    for ids, expected in (([0, 9, 9, 1], None), ([0, 9, 1, 9], StopCut(1, "a"))):
        search, cut = AnswerText(["\ufffd"], Incomplete), None
        for end in range(chunk, len(ids) + chunk, chunk):
            cut = cut or search.take(ids[:end])
        assert cut == expected


@given(text=st.text("ab-", max_size=8), rest=st.text("ab-", max_size=6))
@settings(deadline=None, derandomize=True)
def test_what_is_settled_survives_whatever_follows(text, rest):
    stops = ["--", "ab-"]
    whole = text + rest
    cut = min((i for stop in stops if (i := whole.find(stop)) >= 0), default=len(whole))
    assert settled_length(text, stops) <= cut
    assert settled_length(text, []) == len(text)
