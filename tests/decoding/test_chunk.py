"""Chunks of steps: in a loop on the device, and by calls that are one ahead of it."""

import numpy as np
import pytest

from clover_jax.decoding import programs
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.requests import Request
from clover_jax.decoding.state import RUNNING
from clover_jax.decoding.step import weights_for
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from tests.tiny_models import TINY, random_base, random_head, random_prompts

STEPS = 6


def plain_chunk(room, filled):
    """Return a state's rows before and after a chunk of plain steps, and its records.

    room: tokens that each row emits after its first, one a step.
    """
    engine = Engine(TINY, None, TreeConfig.root_only(), batch_size=len(filled))
    prompts = random_prompts(len(room), seed=3)
    requests = [Request(i, p, 1 + n) for i, (p, n) in enumerate(zip(prompts, room, strict=True))]
    state = engine.prefilled(random_base(), None, requests)
    end = np.asarray(state.end)
    run = programs.compile_chunk(engine.config, STEPS, Placement(None))
    weights = weights_for(None, random_base(), None)
    state, records = run(weights, state, np.array(filled))
    return end, state, programs.read_records(records)


def test_a_chunk_runs_all_its_steps_where_no_row_ends(way):
    end, state, record = plain_chunk([50, 50], [True, True])
    assert record.emitted.tolist() == [[1, 1]] * STEPS
    assert (state.end - end).tolist() == [STEPS, STEPS]


def test_a_chunk_ends_where_a_row_ends(way):
    end, state, record = plain_chunk([50, 2], [True, True])
    steps = {"in a loop": 2, "by calls": 2 + programs.QUEUED - 1}[way]
    assert record.emitted[:, 0].tolist() == [1] * steps + [0] * (len(record.emitted) - steps)
    assert record.emitted[:, 1].sum() == 2
    assert (state.end - end).tolist() == [steps, 2]
    assert (np.asarray(state.finish) == RUNNING).tolist() == [True, False]


def test_empty_slots_end_no_chunk(way):
    _, _, record = plain_chunk([50], [True, False])
    assert record.emitted.tolist() == [[1, 0]] * STEPS


def test_a_row_that_ended_with_its_prompt_ends_the_chunk(way):
    _, _, record = plain_chunk([0, 50], [True, True])
    assert record.emitted[:, 1].sum() == {"in a loop": 0, "by calls": programs.QUEUED}[way]


@pytest.mark.parametrize("tree", [pytest.param("paper25", marks=pytest.mark.slow), "dynamic:8:3:2"])
def test_calls_and_loops_decode_the_same(tree, monkeypatch, fresh_programs):
    head, params = random_head()
    requests = [Request(i, p, 5 + 9 * (i % 3)) for i, p in enumerate(random_prompts(7, seed=6))]

    def rows():
        engine = Engine(TINY, head, parse_tree(tree), batch_size=3)
        done = [p.row for p in engine.stream(random_base(), params, requests) if p.done]
        return {
            row.index: (row.output_ids, row.accepted, row.proposed, row.ranks, row.finish_reason)
            for row in done
        }

    looped = rows()
    monkeypatch.setattr(programs, "loops_on_device", lambda: False)
    programs.compile_programs.cache_clear()
    assert rows() == looped
    assert len(looped) == 7
