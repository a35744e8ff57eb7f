"""Stop strings cut at the same place however the tokens come; text while it comes."""

import dataclasses
import io
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.data.prompts import parse_prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.decoding.generate_run import LiveText
from clover_jax.decoding.requests import Generation, RowUpdate
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_state import AnswerText, RowState, StopCut, find_stop, settled_length
from clover_jax.decoding.row_stream import RowEvent
from tests.tiny_models import TINY
from tests.tiny_tokenizers import save_byte_fallback, save_byte_level

# Tokens 0 to 9 as a tokenizer might have them: of one letter, of several, of none.
WORDS = ["a", "b", "-", "--", "a-", "-b", "", "ab", "b--a", "c"]

CONFIG = dataclasses.replace(TINY, vocab_size=1024)
SHADE = re.compile(r"\033\[\d+m")


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def colourful(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("tokenizer")))


def show(file, tokenizer, row, ids, accepted, stop=(), at_once=False):
    """Let every turn answer `ids`, forward by forward or all at once; return the shown text."""
    prompt = parse_prompt(row, 0, "p:1")
    base = SimpleNamespace(config=CONFIG)
    models = SimpleNamespace(base=base, tokenizer=tokenizer, copies=False)
    state = RowState(prompt, GenerationSettings(stop=tuple(stop)), models, watched_by="forward")
    screen = LiveText(file, tokenizer)
    ends = [1]
    for count in accepted:
        ends.append(min(ends[-1] + count + 1, len(ids)))
    while state.output_row() is None:
        turn = Generation(0, list(state.next_request().prompt_ids))
        for number, end in enumerate(ends):
            if at_once and number < len(accepted):
                continue
            turn.output_ids, turn.accepted = ids[:end], accepted[:number]
            progress = state.take(RowUpdate(turn, [], done=number == len(accepted)))
            screen.take(RowEvent(prompt, progress, state.output_row()))
            if progress.ended:
                break
    return file.getvalue()


def test_a_terminal_shows_the_prompt_dim_and_each_step_in_its_shade(tokenizer):
    ids = tokenizer("abcdef").input_ids
    shown = show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1])
    dim, one, two, off = "\033[2m", "\033[32m", "\033[96m", "\033[0m"
    assert shown == f"{dim}x{off}{one}a{off}{two}bcd{off}{one}ef{off}\n"


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_text_is_plain_where_colours_are_not_wanted(tokenizer, monkeypatch, setting):
    monkeypatch.setenv(*setting)
    ids = tokenizer("abcdef").input_ids
    assert show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1]) == "xabcdef\n"


def test_a_pipe_gets_the_same_text_plain(tokenizer):
    ids = tokenizer("日é!").input_ids
    shown = show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1, 0, 0])
    assert SHADE.sub("", shown) == "x日é!\n"
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, [2, 1, 0, 0]) == "x日é!\n"


@pytest.mark.parametrize(("text", "shown"), [("ab--c", "xab\n"), ("ab--", "xab--\n")])
def test_what_may_belong_to_a_stop_string_waits(tokenizer, text, shown):
    ids = tokenizer(text).input_ids
    accepted = [1, len(text) - 4]
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, accepted, ["--c"]) == shown


def test_nothing_beyond_a_stop_string_is_shown(tokenizer):
    ids = tokenizer("ab--cd").input_ids
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, [4], ["--"]) == "xab\n"


def test_bytes_that_a_later_token_of_the_chunk_undoes_stay_behind_the_stop_string(tmp_path):
    tokenizer = load_tokenizer(save_byte_fallback(tmp_path))
    ids = tokenizer.convert_tokens_to_ids(["<0x61>", "<0x2D>", "<0x2D>", "<0xFF>", "<0x62>"])
    # Read to its end, the run is five replacement characters; its first three bytes are "a--".
    for at_once in (False, True):
        row = {"prompt": "b"}
        assert show(io.StringIO(), tokenizer, row, ids, [4], ["--"], at_once) == "ba\n"


def test_a_conversation_shows_what_is_said(tokenizer):
    ids = tokenizer("yes").input_ids
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "well?"}]
    assert show(io.StringIO(), tokenizer, {"question": "so?"}, ids, [1]) == "so?\nyes\n"
    shown = show(io.StringIO(), tokenizer, {"messages": messages}, ids, [1])
    assert shown == "well?\nyes\n"


def test_every_turn_shows_its_question(tokenizer):
    ids = tokenizer("yes").input_ids
    shown = show(io.StringIO(), tokenizer, {"turns": ["one", "two"]}, ids, [1])
    assert shown == "one\nyes\ntwo\nyes\n"


def test_ids_are_shown_for_a_prompt_of_ids_or_without_a_tokenizer(tokenizer):
    ids = tokenizer("yes").input_ids
    row = {"prompt_ids": tokenizer("x").input_ids}
    assert show(io.StringIO(), tokenizer, row, ids, [1]) == "xyes\n"
    assert show(io.StringIO(), None, {"prompt_ids": [5]}, [7, 8, 9], [1]) == "5 7 8 9 \n"
