"""The sweep's table and figure, with the machine's costs given."""

import dataclasses

import pytest

from clover_jax.benchmark import sweep
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.errors import UserError
from clover_jax.loading.models import load_shapes
from clover_jax.loading.spec import ModelSpec
from clover_jax.tree_search.tree_choice import CostTable


@pytest.fixture
def models():
    return load_shapes(
        ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:3", dtype="float32")
    )


@pytest.fixture
def cells(models, monkeypatch):
    def costs(models, batch, context, slots, widths, rounds, depth):
        assert depth == 3  # as many positions may wait for the head, and one more
        verify = tuple((count, 0.001 * batch * count) for count in slots)
        level = tuple((width, 0.0001 * width) for width in widths)
        return CostTable(0.002, verify, 0.0007, level, 0.0001)

    monkeypatch.setattr(sweep, "measure_costs", costs)
    return sweep.sweep(models, [1, 2], [4, 1], context=10, rounds=3)


def test_a_cell_adds_up_what_a_step_costs(cells):
    # absorb and first level 0.7, two more levels of width 1 at 0.1, verify 2.0, rest 0.1
    assert dataclasses.asdict(cells[1]) == {
        "batch_size": 1,
        "nodes": 1,
        "plain_ms": 2.0,
        "verify_ms": 2.0,
        "draft_ms": 0.9,
        "break_even": pytest.approx(0.5),
    }


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


@pytest.mark.parametrize(
    ("name", "widths"), [("paper25", [4, 4, 1, 1]), ("dynamic:9:3:4", [4, 4]), ("chain:1", [])]
)
def test_expanded_widths(name, widths, models):
    assert sweep.expanded_widths(models.with_tree(parse_tree(name))) == widths


def test_what_a_head_of_three_positions_cannot_draft_is_not_expanded():
    models = load_shapes(
        ModelSpec("shape:64x1x96", draft="random:clover", tree="clover4", dtype="float32")
    )
    assert sweep.expanded_widths(models) == [4, 4]
