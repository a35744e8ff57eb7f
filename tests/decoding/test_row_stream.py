"""Rows around the engine: contexts, stop strings, live text, forward passes, times, totals."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import jax.monitoring
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax import api
from clover_jax.data.detokenization import settled_length
from clover_jax.data.prompts import parse_prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.generate_run import LiveText, decode_with_bar
from clover_jax.decoding.models import load
from clover_jax.decoding.requests import Generation, RowUpdate
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_state import (
    AnswerText,
    RowState,
    Skipped,
    StopCut,
    copied_parts,
    find_stop,
    fit_context,
    forward_groups,
    forwards_until,
)
from clover_jax.decoding.row_stream import RowEvent, RowTotals, open_stream
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.runtime import compile_clock
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.progress import progress_bar
from clover_jax.runtime.row_writer import RowSink
from tests.tiny_models import TINY
from tests.tiny_tokenizers import save_byte_fallback, save_byte_level

BASE = dataclasses.replace(TINY, max_position_embeddings=16, bos_token_id=0)

PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def push", "import os\n\ndef main(")


def fit(ids, policy, max_new_tokens=4):
    settings = GenerationSettings(max_new_tokens=max_new_tokens, context_overflow=policy)
    return fit_context(ids, BASE, settings, "p.jsonl:1")


def test_a_prompt_beyond_the_context_is_refused_or_left_out_with_the_numbers():
    for policy in ("error", "truncate_left", "skip"):
        assert fit(list(range(15)), policy) == list(range(15)), "room for one token"
    said = "p.jsonl:1: the prompt has 16 tokens and the base's context is 16"
    with pytest.raises(UserError, match=f"{said}; shorten it, or give --context_overflow"):
        fit([1] * 16, "error")
    with pytest.raises(Skipped, match=f"{said}$"):
        fit([1] * 16, "skip")


@pytest.mark.parametrize(("max_new_tokens", "kept"), [(4, 12), (1, 15), (8, 8), (100, 8)])
def test_the_end_of_a_prompt_is_kept_and_room_made(max_new_tokens, kept):
    ids = list(range(1, 31))
    assert fit(ids, "truncate_left", max_new_tokens) == ids[-kept:]
    assert fit([0, *ids], "truncate_left", max_new_tokens) == [0, *ids[-(kept - 1) :]]


def test_warming_up_compiles_everything_and_reads_no_prompt(base, monkeypatch):
    models = load(ModelSpec(str(base), dtype="float32"))
    prompt = parse_prompt({"prompt_ids": [7] * 100}, index=0, source="here")
    stream = open_stream(models, [prompt], GenerationSettings(max_new_tokens=4))
    starts, read_chunk = [], Engine._read_chunk

    def counted(engine, slot):
        starts.append(engine._rows[slot].num_read)
        return read_chunk(engine, slot)

    monkeypatch.setattr(Engine, "_read_chunk", counted)
    stream.warm_up()
    assert starts == [0]
    with CompileClock() as compiling:
        (row,) = [event.row for event in stream if event.row]
    assert (starts, compiling.seconds) == ([0, 0, 64], 0)
    assert len(row["output_ids"]) == 4


def test_the_examples_of_forward_passes():
    turn = Generation(0, [1], output_ids=[5, 6, 7, 8, 9], accepted=[2, 4])
    assert list(forward_groups(turn, 0)) == [(0, [5]), (1, [6, 7, 8]), (2, [9])]
    assert list(forward_groups(turn, 2)) == [(1, [7, 8]), (2, [9])]
    assert list(forward_groups(turn, 5)) == []

    took = {0: 0, 1: 0, 2: 1, 4: 1, 5: 2, 6: 3, 9: 3}  # 9: a cut at the limit counts all
    assert {n: forwards_until([2, 0, 3], n) for n in took} == took

    row = Generation(0, [1], [], accepted=[0, 3], copied=[0, 2])
    assert copied_parts(row, 2, [5, 6, 7, 8]) == [([5], False), ([6, 7], True), ([8], False)]
    assert copied_parts(row, 2, [5, 6]) == [([5], False), ([6], True)]  # cut by a limit
    assert copied_parts(row, 1, [5]) == copied_parts(row, 0, [5]) == [([5], False)]


@pytest.mark.parametrize("compiled", [0.0, 8.0])
def test_neither_the_rate_nor_the_clock_counts_compilation(monkeypatch, compiled):
    now, shown = [100.0], io.StringIO()
    monkeypatch.setattr(compile_clock.time, "perf_counter", lambda: now[0])

    def stream():
        now[0] += 2.0 + compiled
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile", compiled)
        yield RowEvent(None, row=row([1] * 20, [1] * 10))

    with CompileClock() as compiling, progress_bar(1, "generate", "row", file=shown) as bar:
        decode_with_bar(stream(), RowSink(), RowTotals(), bar, compiling)
    assert compiling.now() == 102.0
    assert "10 tokens/s" in shown.getvalue()


def row(output_ids, accepted, reason="length"):
    return {"index": 0, "output_ids": output_ids, "accepted": accepted, "finish_reason": reason}


def test_rows_turns_and_failures_are_counted():
    rows = [row([1, 2, 3, 4], [2]), {"index": 2, "error": "bad"}, {"index": 3, "skipped": "long"}]
    rows.append(row([[1, 2], [], [5]], [[0], [3], []], ["eos", "stop", "length"]))
    figures = RowTotals(rows)
    assert figures.to_dict() == {
        "tau": pytest.approx(4 / 3),
        "tokens": 7,
        "target_forwards": 3,
        "accepted_histogram": [1, 0, 1, 1],
        "rows": 4,
        "failed": 1,
        "skipped": 1,
    }
    assert figures.summary(12.4) == (
        "tau 1.33, 7 tokens in 3 forwards, 12 tokens/s; "
        "drafted tokens accepted per forward: 0: 33 %, 2: 33 %, 3: 33 %"
    )


def test_nothing_decoded_has_no_tau_and_plain_decoding_no_shares():
    assert RowTotals().tau is None
    assert RowTotals([row([1], [])]).summary(None) == "tau none, 1 tokens in 0 forwards"
    plain = RowTotals([row([1, 2, 3], [0, 0])])
    assert plain.summary(None) == "tau 1.00, 3 tokens in 2 forwards"


@pytest.fixture(scope="module")
def tiny():
    return api.load_base()


@pytest.fixture(scope="module")
def plain(tiny):
    return decode(tiny, [{"prompt": prompt} for prompt in PROMPTS])


def decode(models, rows):
    decoded = api.generate_rows(models, rows, max_new_tokens=48, batch_size=2)
    return sorted(decoded, key=lambda row: row["index"])


def forwards(rows):
    return [row["target_forwards"] for row in rows]


def test_a_right_prediction_makes_text_arrive_sooner_and_a_wrong_one_changes_nothing(tiny, plain):
    models = api.load_draft(tiny, "lookup", "copy:12")
    predictions = ("Nothing of this is Python. " * 9, "a" * 100_000, "a" * 100_000)
    right, wrong = (
        [{"prompt": p, "prediction": told} for p, told in zip(PROMPTS, predicted, strict=True)]
        for predicted in ([row["text"] for row in plain], predictions)
    )
    given = [{"prompt": p} for p in PROMPTS], right, wrong
    alone, helped, misled = (decode(models, rows) for rows in given)
    for rows in (alone, helped, misled):
        assert [row["text"] for row in rows] == [row["text"] for row in plain]
    assert max(forwards(helped)) < min(forwards(plain)) / 4
    assert sum(forwards(helped)) < sum(forwards(alone))
    # What one row brings is no other's.
    mixed = decode(models, [right[0], {"prompt": PROMPTS[1]}, wrong[2]])
    assert forwards(mixed)[0] == forwards(helped)[0]


def test_all_rows_copy_from_one_file(tiny, plain, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(row["text"] for row in plain))
    models = api.load_draft(tiny, "lookup", "copy:12", copy_from=path)
    rows = decode(models, [{"prompt": p} for p in PROMPTS])
    assert [row["text"] for row in rows] == [row["text"] for row in plain]
    assert max(forwards(rows)) < min(forwards(plain)) / 3


def test_copies_beside_a_tree_are_asked_for_by_flag_or_by_name(tiny):
    assert api.load_draft(tiny, "lookup").tree.name == "copy:25"
    assert api.load_draft(tiny, "lookup", copy=4).tree.name == "copy:4"
    beside = api.load_draft(tiny, "lookup", "chain:2", copy=4).tree
    assert (beside.name, beside.num_nodes, beside.depth) == ("chain:2+copy:4", 6, 4)
    with pytest.raises(UserError, match="has copies already"):
        api.load_draft(tiny, "lookup", "copy:3", copy=4)
    with pytest.raises(UserError, match="--copy=4 needs a draft"):
        api.load_draft(tiny, "none", copy=4)
    with pytest.raises(UserError, match="has no copies"):
        api.load_draft(tiny, "random:clover2", copy_from=__file__)
    with pytest.raises(UserError, match="--copy_from=.*nothing"):
        api.load_draft(tiny, "lookup", copy_from="/nowhere/nothing")
    with pytest.raises(UserError, match="prediction must be a string"):
        parse_prompt(json.loads('{"prompt": "a", "prediction": 5}'), 0, "rows")


# Tokens 0 to 9 as a tokenizer might have them: of one letter, of several, of none.
WORDS = ["a", "b", "-", "--", "a-", "-b", "", "ab", "b--a", "c"]

CONFIG = dataclasses.replace(TINY, vocab_size=1024)
SHADE = re.compile(r"\033\[\d+m")


class Words:
    """Text that every token settles."""

    def push(self, ids):
        return words_of(ids)

    def held(self):
        return ""

    def holds_back(self, ids):
        return False


class Letters(Words):
    """The same of tokens that are letters."""

    push = staticmethod("".join)


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
            text += ("?" * len(self._run) if id_ == 9 else words_of(self._run)) + words_of([id_])
            self._run = []
        return text

    def held(self):
        return words_of(self._run)

    def holds_back(self, ids):
        return any(2 <= id_ <= 5 for id_ in ids)


def words_of(ids):
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
    keeping, kept = AnswerText(stops, pieces, keeps_stop=True), None
    ends = range(chunk, len(ids) + chunk, chunk)
    for end in ends:
        kept = kept or keeping.take(ids[:end])
    assert kept == find_stop(pieces, ids, stops, keeps_stop=True)
    assert (kept is None) == (found is None)
    assert kept is None or kept.text.removeprefix(found.text) in stops
    if found and pieces is Words:
        text = words_of(ids)
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
def colorful(monkeypatch):
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


def test_a_terminal_shows_the_prompt_dim_and_each_step_in_its_shade(tokenizer, monkeypatch):
    ids = tokenizer("abcdef").input_ids
    shown = show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1])
    dim, one, two, off = "\033[2m", "\033[32m", "\033[96m", "\033[0m"
    assert shown == f"{dim}x{off}{one}a{off}{two}bcd{off}{one}ef{off}\n"
    # Where colors are not wanted the text is plain.
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1]) == "xabcdef\n"


def test_a_pipe_gets_the_same_text_plain(tokenizer):
    ids = tokenizer("日é!").input_ids
    shown = show(Terminal(), tokenizer, {"prompt": "x"}, ids, [2, 1, 0, 0])
    assert SHADE.sub("", shown) == "x日é!\n"
    assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, [2, 1, 0, 0]) == "x日é!\n"


def test_what_may_belong_to_a_stop_string_waits(tokenizer):
    for text, accepted, stop, shown in (
        ("ab--c", [1, 1], "--c", "xab\n"),
        ("ab--", [1, 0], "--c", "xab--\n"),
        ("ab--cd", [4], "--", "xab\n"),
    ):
        ids = tokenizer(text).input_ids
        assert show(io.StringIO(), tokenizer, {"prompt": "x"}, ids, accepted, [stop]) == shown


def test_bytes_that_a_later_token_of_the_chunk_undoes_stay_behind_the_stop_string(tmp_path):
    tokenizer = load_tokenizer(save_byte_fallback(tmp_path))
    ids = tokenizer.convert_tokens_to_ids(["<0x61>", "<0x2D>", "<0x2D>", "<0xFF>", "<0x62>"])
    # Read to its end, the run is five replacement characters; its first three bytes are "a--".
    for at_once in (False, True):
        row = {"prompt": "b"}
        assert show(io.StringIO(), tokenizer, row, ids, [4], ["--"], at_once) == "ba\n"


def test_a_conversation_shows_what_is_said_and_every_turn_its_question(tokenizer):
    ids = tokenizer("yes").input_ids
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "well?"}]
    assert show(io.StringIO(), tokenizer, {"question": "so?"}, ids, [1]) == "so?\nyes\n"
    shown = show(io.StringIO(), tokenizer, {"messages": messages}, ids, [1])
    assert shown == "well?\nyes\n"
    shown = show(io.StringIO(), tokenizer, {"turns": ["one", "two"]}, ids, [1])
    assert shown == "one\nyes\ntwo\nyes\n"


def test_ids_are_shown_for_a_prompt_of_ids_or_without_a_tokenizer(tokenizer):
    ids = tokenizer("yes").input_ids
    row = {"prompt_ids": tokenizer("x").input_ids}
    assert show(io.StringIO(), tokenizer, row, ids, [1]) == "xyes\n"
    assert show(io.StringIO(), None, {"prompt_ids": [5]}, [7, 8, 9], [1]) == "5 7 8 9 \n"
