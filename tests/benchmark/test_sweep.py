"""The sweep's table and figure, with the machine's costs given."""

import dataclasses

import pytest

from clover_jax.benchmark import sweep
from clover_jax.errors import UserError
from clover_jax.loading.models import load, load_shapes
from clover_jax.loading.spec import ModelSpec
from clover_jax.timing.loops import steps_at_once


@pytest.fixture
def models():
    return load_shapes(
        ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:3", dtype="float32")
    )


@pytest.fixture
def cells(models, monkeypatch):
    def measure(models, batch, context, nodes, rounds):
        assert nodes == [1, 3, 4]  # the tree's own 3 are among them
        verify = {f"verify {count}": 0.001 * batch * (count + 1) for count in nodes}
        return {"plain": 0.002, "draft": 0.0009, "step": 0.005 + 0.004 * (batch - 1)} | verify

    monkeypatch.setattr(sweep, "measure", measure)
    return sweep.sweep(models, [1, 2], [4, 1], context=10, rounds=3)


def test_a_cell_adds_up_what_a_step_costs(cells):
    # draft 0.9, verify 2.0, and the rest of the measured step: 5.0 less 0.9 and 4.0
    assert dataclasses.asdict(cells[1]) == {
        "batch_size": 1,
        "nodes": 1,
        "plain_ms": 2.0,
        "verify_ms": 2.0,
        "draft_ms": 0.9,
        "break_even": pytest.approx(0.5),
    }


@pytest.mark.parametrize("kind, tree", [("clover2", "chain:2+copy:2"), ("clover", "clover4")])
def test_every_part_of_a_step_is_timed_by_itself(kind, tree, monkeypatch):
    models = load(ModelSpec("shape:64x1x96", draft=f"random:{kind}", tree=tree, dtype="float32"))
    monkeypatch.setattr(
        sweep,
        "time_in_turns",
        lambda runs, rounds: {n: 8.0 for n in runs if runs[n]()[0] is not None},
    )
    seconds = sweep.measure(models, 2, 10, [1, 4], rounds=3)
    assert list(seconds) == ["plain", "step", "draft", "verify 1", "verify 4"]
    assert set(seconds.values()) == {8.0 / steps_at_once()}


def test_every_batch_size_and_tree_size_is_a_row(cells):
    lines = sweep.describe(cells, "chain:3")
    assert [line.split()[:2] for line in lines[2:]] == [
        *(["1", "4"], ["1", "1"], ["2", "4"], ["2", "1"])
    ]


def test_the_figure_is_a_png(cells, tmp_path):
    assert sweep.draw(cells, tmp_path / "new").read_bytes().startswith(b"\x89PNG")


def test_a_base_alone_has_nothing_to_sweep(models):
    with pytest.raises(UserError, match="--sweep needs a draft"):
        sweep.sweep(models.plain(), [1], [4], 10, 3)
