"""The sweep's table, with the seconds of every program given."""

import pytest

from clover_jax.decoding.models import load
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.evaluation import sweep
from clover_jax.evaluation.parts import steps_at_once

SECONDS = {"plain": 0.002, "step": 0.005, "draft": 0.0009}


@pytest.fixture(scope="module")
def models():
    return load(ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:3", dtype="float32"))


def test_a_cell_adds_up_what_a_step_costs(models, monkeypatch):
    asked = []

    def seconds(runs, rounds):
        asked.append([name for name in runs if name.startswith("verify")])
        verify = {name: 0.001 * int(name.split()[1]) for name in asked[-1]}
        return {name: steps_at_once() * each for name, each in (SECONDS | verify).items()}

    monkeypatch.setattr(sweep, "time_in_turns", seconds)
    cells = sweep.sweep(models, [1, 2], [5, 1], context=10, rounds=3)
    assert [(cell["batch_size"], cell["nodes"]) for cell in cells] == [
        *((1, 5), (1, 1), (2, 5), (2, 1))
    ]
    # A root and the nodes; of the tree of 3 nodes too, whose whole step is timed.
    assert asked == [["verify 2", "verify 4", "verify 6"]] * 2
    # The rest of a step is 5 - 0.9 - 4 = 0.1 ms.
    assert cells[1] == {
        "batch_size": 1,
        "nodes": 1,
        "plain_ms": 2.0,
        "verify_ms": 2.0,
        "draft_ms": 0.9,
        "break_even": pytest.approx(0.5),
    }


def test_a_base_alone_has_nothing_to_sweep(models):
    with pytest.raises(UserError, match="--sweep needs a draft"):
        sweep.sweep(models.plain(), [1], [4], 10, 3)
