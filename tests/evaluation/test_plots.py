"""The plots: no text is cut, crosses an axis or another text, and looks follow names."""

import itertools

import matplotlib
import pytest
from matplotlib.text import Text

from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.plots import RC, draw_plots, looks, plots_of

TASKS = ["mt_bench", "translation", "summarization", "question-answering-long", "math", "rag"]
LONG = "clover2-shared-attention-decoder.trained_on-sharegpt-and-ultrachat-for-300k-steps"


def spread(median):
    return {"median": median, "least": median - 0.1, "most": median + 0.2, "repeats": [median]}


def cell(number, depth):
    rates = [max(0.9 - 0.1 * i - 0.05 * number, 0.0) for i in range(depth)]
    return {
        "tau": 2.5 - 0.1 * number,
        "rows": 16,
        "hit_rate": rates,
        "conditional_hit_rate": [1.0, *rates[1:]],
        "target_forwards": 100,
        "num_accepted_tokens_per_pos": [round(100 * rate) for rate in rates],
    }


def report(num_drafts, num_tasks, depth=5, name="draft"):
    """Return a report as the plots read it; the last draft has a shorter tree."""
    drafts = [f"{name}-{number}" for number in range(num_drafts)]
    tasks = TASKS[:num_tasks]
    cells = {}
    for number, draft in enumerate(drafts):
        figures = cell(number, depth - (number and number + 1 == num_drafts))
        cells[draft] = {"overall": figures, "tasks": dict.fromkeys(tasks, figures)}
    speeds = {
        draft: {"overall": {"speedup": spread(1.5 + 0.2 * number)}}
        for number, draft in enumerate(drafts)
    }
    return {
        "methods": {VANILLA: {"overall": {"rows": 16}}, **cells},
        "tasks": tasks,
        "batch_sizes": [8, 1, 16],
        "speed": dict.fromkeys(("8", "1", "16"), speeds),
        "manifest": {
            "base": {"source": "runs/a_long_folder/another_long_folder/" + "base" * num_drafts},
            "dtype": "bfloat16",
            "flags": {"temperature": 0.7},
            "hardware": {"device": "cpu"},
            "drafts": {name: {"tree": "dynamic:25:5:4+copy:8"} for name in drafts},
        },
    }


def shown_texts(figure):
    """Return the texts that are drawn: not the labels of ticks beyond the ends of an axis."""
    hidden = set()
    for axis in itertools.chain.from_iterable((axes.xaxis, axes.yaxis) for axes in figure.axes):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden |= {tick.label1, tick.label2}
    texts = (text for text in figure.findobj(Text) if text not in hidden)
    return [text for text in texts if text.get_visible() and text.get_text()]


@pytest.mark.parametrize("name", ["draft", LONG])
@pytest.mark.parametrize(("num_drafts", "num_tasks"), [(1, 1), (2, 6), (6, 1), (6, 6)])
def test_no_text_is_cut_or_crossed(num_drafts, num_tasks, name):
    plots = plots_of(report(num_drafts, num_tasks, name=name))
    assert len(plots) == 3 + (num_tasks > 1)
    for title, draw in plots.items():
        with matplotlib.rc_context(RC):
            figure = draw()
            figure.draw_without_rendering()
        texts = shown_texts(figure)
        boxes = [text.get_window_extent() for text in texts]
        for text, box in zip(texts, boxes, strict=True):
            said = (title, text.get_text())
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, said
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, said
            assert not any(box.overlaps(axes.bbox) for axes in figure.axes), said
        for (one, a), (other, b) in itertools.combinations(zip(texts, boxes, strict=True), 2):
            assert not a.overlaps(b), (title, one.get_text(), other.get_text())


def test_markers_on_the_axes_are_whole():
    axes, _ = plots_of(report(2, 1))["acceptance_by_position"]().axes
    assert not any(line.get_clip_on() for line in axes.lines)


def test_both_panels_end_where_forwards_end():
    rare = report(1, 1, depth=25)
    (figures,) = [cells["overall"] for name, cells in rare["methods"].items() if name != VANILLA]
    # Nine forwards reach position 3, too few for a rate.
    figures["num_accepted_tokens_per_pos"] = [40, 30, 9, 1, *[0] * 21]
    for axes in plots_of(rare)["acceptance_by_position"]().axes:
        assert [len(line.get_xdata()) for line in axes.lines] == [3]
        assert axes.get_xlim()[1] < 3


def test_plain_decoding_alone_and_drafts_without_a_forward_have_no_plots():
    assert plots_of(report(0, 1)) == {}
    empty = report(1, 1)
    empty["methods"]["draft-0"]["overall"]["tau"] = None
    assert plots_of(empty) == {}


def test_a_method_looks_the_same_in_every_report():
    assert looks(["lookup"]) == {"lookup": looks(["clover2", "runs-a", "lookup"])["lookup"]}
    assert looks(["a"])["a"] == looks(["lookup", "recycle", "a"])["a"]
    assert looks(["a", "lookup"])["a"].color != looks(["lookup"])["lookup"].color


def test_looks_of_drafts_and_baselines_differ_also_without_colors():
    drafts = [f"draft{number}" for number in range(12)]
    found = looks(["lookup", *drafts, "recycle"]).values()
    assert len(set(found)) == len({(look.color, look.hatch) for look in found}) == 14
    few = looks(["lookup", "recycle", *drafts[:4]]).values()
    assert len({(look.marker, look.hatch) for look in few}) == 6


def test_the_name_of_a_task_is_no_formula(tmp_path):
    odd = report(1, 2)
    odd["tasks"] = [r"price $\frac$", "qa"]
    cells = odd["methods"]["draft-0"]
    cells["tasks"] = dict.fromkeys(odd["tasks"], cells["overall"])
    files = draw_plots(odd, tmp_path)
    assert [file.name for file in files] == [
        *("tau.png", "acceptance_by_position.png", "speedup.png", "tau_by_task.png")
    ]
    assert all(file.stat().st_size > 1000 for file in files)
