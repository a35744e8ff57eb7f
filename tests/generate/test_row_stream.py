"""Rows before, in and after the engine: contexts, warm-up, forward passes, times, totals."""

import dataclasses
import io
import json

import jax.monitoring
import pytest

from clover_jax import api
from clover_jax.data.prompts import parse_prompt
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.generate_run import decode_with_bar
from clover_jax.decoding.models import load
from clover_jax.decoding.requests import Generation
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.row_state import (
    Skipped,
    copied_parts,
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
    figures = RowTotals(
        [
            row([1, 2, 3, 4], [2]),
            row([[1, 2], [], [5]], [[0], [3], []], ["eos", "stop", "length"]),
            {"index": 2, "error": "bad"},
            {"index": 3, "skipped": "long"},
        ]
    )
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
        "drafted tokens accepted a forward: 0: 33 %, 2: 33 %, 3: 33 %"
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
    right = [
        {"prompt": p, "prediction": row["text"]} for p, row in zip(PROMPTS, plain, strict=True)
    ]
    predictions = ("Nothing of this is Python. " * 9, "a" * 100_000, "a" * 100_000)
    wrong = [{"prompt": p, "prediction": w} for p, w in zip(PROMPTS, predictions, strict=True)]
    alone, helped, misled = (
        decode(models, rows) for rows in ([{"prompt": p} for p in PROMPTS], right, wrong)
    )
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


def test_a_file_to_copy_from_that_cannot_be_read_is_named(tiny, tmp_path):
    with pytest.raises(UserError, match="--copy_from=.*nothing"):
        api.load_draft(tiny, "lookup", copy_from=tmp_path / "nothing")
    with pytest.raises(UserError, match="prediction must be a string"):
        parse_prompt(json.loads('{"prompt": "a", "prediction": 5}'), 0, "rows")
