"""The cost table's arithmetic, with the seconds of every program given."""

import dataclasses

import pytest

from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import registry
from clover_jax.loading.decode_states import running_state
from clover_jax.loading.models import load
from clover_jax.loading.spec import ModelSpec
from clover_jax.timing import parts
from clover_jax.timing.loops import steps_at_once
from clover_jax.tree_search import costs

FIRST, LEVEL, REST = 0.5, 0.25, 0.125


def verified(slots):
    """Seconds that jump where a tree has more slots than the processor takes at once."""
    return 1.0 if slots <= 8 else 16.0


@pytest.fixture
def measure_costs(monkeypatch):
    """Measure on a machine whose programs take what the functions above say."""

    def seconds(name, levels):
        kind, _, size = name.partition(" ")
        drafting = FIRST + (levels - 1) * LEVEL
        if kind == "draft" and size:
            return FIRST + (LEVEL if int(size) else 0.0)
        if kind == "verify":
            return verified(int(size))
        step = drafting + verified(levels + 1) + REST
        return {"plain": 1.0, "draft": drafting, "step": step}[name]

    def measure(subject, levels, **sizes):
        def in_turns(runs, rounds):
            return {name: steps_at_once() * seconds(name, levels) for name in runs}

        monkeypatch.setattr(costs, "time_in_turns", in_turns)
        return costs.measure_costs(subject, 1, 100, **sizes)

    return measure


@pytest.fixture(scope="module")
def subject():
    return load(ModelSpec("shape:64x1x96", draft="random:clover2", tree="paper25", dtype="float32"))


def test_what_is_left_of_a_step_hangs_on_no_size_that_was_not_measured(measure_costs, subject):
    table = measure_costs(subject, levels=2, slots=(1, 26), widths=(1,))
    assert table.rest == pytest.approx(REST)
    assert {1, 26} <= dict(table.verify).keys()


def test_a_head_of_one_position_has_costs_without_further_levels(measure_costs, subject):
    config = dataclasses.replace(subject.head.config, num_positions=1, max_depth=1)
    draft = dataclasses.replace(subject.draft, head=registry.head(config))
    shallow = dataclasses.replace(subject, draft=draft, tree=parse_tree("chain:1"))
    table = measure_costs(shallow, levels=1, slots=(1, 8), widths=(1, 4))
    assert (table.level, table.rest) == ((), pytest.approx(REST))
    assert table.step(shallow.tree) == pytest.approx(FIRST + verified(2) + REST)


def test_as_many_positions_wait_for_the_head_as_the_tree_may_accept(
    measure_costs, subject, monkeypatch
):
    waiting = []

    def spied(subject, *sizes):
        state = running_state(subject, *sizes)
        waiting.append(state.count.tolist())
        return state

    monkeypatch.setattr(parts, "running_state", spied)
    table = measure_costs(subject, levels=5, slots=(26,), widths=(1, 4), depth=5)
    assert waiting == [[6], [1]]  # with the draft, and without
    assert table.rest == pytest.approx(REST)
