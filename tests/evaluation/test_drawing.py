"""Labels that do not touch, looks that differ."""

import itertools

import pytest

from clover_jax.evaluation.drawing import grouped_bars, look, new_figure, save, spread_out


def test_the_example():
    assert spread_out([5, 5, 1], 2, 6) == [4, 6, 1]


@pytest.mark.parametrize("heights", [[0, 0, 0, 0], [1, 0.99, 1.0, 0.5], [0.2], []])
def test_labels_are_apart_and_below_the_ceiling(heights):
    placed = sorted(spread_out(heights, 0.1, 1.02))
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(placed))
    assert all(height <= 1.02 for height in placed)


def test_six_drafts_differ_without_their_colours():
    assert len({(look(i).marker, look(i).hatch) for i in range(6)}) == 6


def test_the_name_of_a_task_is_no_formula(tmp_path):
    def draw():
        figure, (axes,) = new_figure()
        grouped_bars(axes, [r"price $\frac$"], {"a": [1.0]})
        return figure

    assert save("bars", draw, tmp_path).stat().st_size > 1000
