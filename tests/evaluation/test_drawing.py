"""Looks that differ, and names that matplotlib must not read as formulas."""

from clover_jax.evaluation.drawing import draw_bars, look, new_figure, save


def test_drafts_differ_without_their_colours():
    assert len({(look(i).marker, look(i).hatch) for i in range(6)}) == 6


def test_looks_of_two_reports_with_six_drafts_each_differ():
    assert len({look(i) for i in range(12)}) == 12
    assert len({(look(i).colour, look(i).hatch) for i in range(12)}) == 12


def test_the_name_of_a_task_is_no_formula(tmp_path):
    def draw():
        figure, (axes,) = new_figure()
        draw_bars(axes, [r"price $\frac$"], {"a": [1.0]})
        return figure

    assert save("bars", draw, tmp_path).stat().st_size > 1000
