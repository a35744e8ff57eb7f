"""What a person sees: the same text with and without colours, a shade for each step."""

import dataclasses
import io
import re
from types import SimpleNamespace

import pytest

from clover_jax.data.prompts import parse_prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.decoding.generate_run import LiveText
from clover_jax.decoding.requests import Generation, RowUpdate
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_state import RowState
from clover_jax.decoding.row_stream import RowEvent
from tests.tiny_models import TINY
from tests.tiny_tokenizers import save_byte_fallback, save_byte_level

CONFIG = dataclasses.replace(TINY, vocab_size=1024)
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
    while not state.is_finished:
        turn = Generation(0, list(state.next_request().prompt_ids))
        for number, end in enumerate(ends):
            if at_once and number < len(accepted):
                continue
            turn.output_ids, turn.accepted = ids[:end], accepted[:number]
            progress = state.take(RowUpdate(turn, [], done=number == len(accepted)))
            row = state.output_row() if state.is_finished else None
            screen.take(RowEvent(prompt, progress, row))
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
