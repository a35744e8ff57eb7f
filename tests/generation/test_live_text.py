"""What a person sees: the same text with and without colours, a shade for each step."""

import io
import re
from types import SimpleNamespace

import pytest

from clover_jax.data.prompts import parse_prompt
from clover_jax.decoding.requests import Generation
from clover_jax.generation.live_text import LiveText, groups
from clover_jax.generation.row_stream import RowEvent
from clover_jax.tokenizers.tokenizer import load_tokenizer
from tests.tiny_tokenizers import save_byte_level

SHADE = re.compile(r"\033\[\d+m")


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


def show(file, tokenizer, row, ids, accepted, final=None, stop=()):
    """Let an answer of `ids` come forward by forward; `final` is its text in the end."""
    prompt_ids = [5] if tokenizer is None else tokenizer("x").input_ids
    job = SimpleNamespace(
        prompt=parse_prompt(row, 0, "p:1"),
        settings=SimpleNamespace(stop=stop),
        turns=[],
        is_finished=False,
    )
    screen, turn = LiveText(file, tokenizer), Generation(0, prompt_ids)
    ends = [1]
    for count in accepted:
        ends.append(min(ends[-1] + count + 1, len(ids)))
    for number, end in enumerate(ends):
        turn.output_ids, turn.accepted = ids[:end], accepted[:number]
        ended = number == len(accepted)
        if ended:
            job.turns.append(SimpleNamespace(text=final))
        screen.take(RowEvent(job, turn, ended))
    return file.getvalue()


def test_groups_are_as_in_their_example():
    turn = Generation(0, [1], output_ids=[5, 6, 7, 8, 9], accepted=[2, 4])
    assert list(groups(turn, 0)) == [(0, [5]), (1, [6, 7, 8]), (2, [9])]
    assert list(groups(turn, 2)) == [(1, [7, 8]), (2, [9])]
    assert list(groups(turn, 5)) == []


def test_a_terminal_shows_the_prompt_dim_and_each_step_in_its_shade(tokenizer):
    ids = tokenizer("abcdef").input_ids
    shown = show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1], "abcdef")
    dim, one, two, off = "\033[2m", "\033[32m", "\033[96m", "\033[0m"
    assert shown == f"{dim}x{off}{one}a{off}{two}bcd{off}{one}ef{off}\n"


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_text_is_plain_where_colours_are_not_wanted(tokenizer, monkeypatch, setting):
    monkeypatch.setenv(*setting)
    ids = tokenizer("abcdef").input_ids
    assert show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1], "abcdef") == "xabcdef\n"


def test_a_pipe_gets_the_same_text_plain(tokenizer):
    ids = tokenizer("日é!").input_ids
    shown = show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1, 0, 0], "日é!")
    assert SHADE.sub("", shown) == "x日é!\n"
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, [2, 1, 0, 0], "日é!") == "x日é!\n"


@pytest.mark.parametrize(("final", "shown"), [("ab", "xab\n"), ("ab--", "xab--\n")])
def test_what_may_belong_to_a_stop_string_waits(tokenizer, final, shown):
    ids = tokenizer("ab--").input_ids
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, [1, 0], final, ["--c"]) == shown


def test_nothing_beyond_a_stop_string_is_shown(tokenizer):
    ids = tokenizer("ab--cd").input_ids
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, [4], "ab", ["--"]) == "xab\n"


def test_a_conversation_shows_what_is_said(tokenizer):
    ids = tokenizer("yes").input_ids
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "well?"}]
    assert show(io.StringIO(), tokenizer, {"question": "so?"}, ids, [1], "yes") == "so?\nyes\n"
    turns = {"turns": ["one", "two"]}
    # An answer that ends in its first event is in the job's turns by then.
    assert show(io.StringIO(), tokenizer, turns, ids, [], "yes") == "one\nyes\n"
    shown = show(io.StringIO(), tokenizer, {"messages": messages}, ids, [1], "yes")
    assert shown == "well?\nyes\n"


def test_ids_are_shown_for_a_prompt_of_ids_or_without_a_tokenizer(tokenizer):
    ids = tokenizer("yes").input_ids
    row = {"prompt_ids": [5]}
    assert show(io.StringIO(), tokenizer, row, ids, [1], "yes") == "xyes\n"
    assert show(io.StringIO(), None, row, [7, 8, 9], [1]) == "5 7 8 9 \n"
