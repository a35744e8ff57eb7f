"""The plots: no text is cut, crosses an axis or another text, and no line is a single dot."""

import itertools

import pytest
from matplotlib.text import Text

from clover_jax.evaluation.drawing import look, style
from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.plots import plots_of

MARKERS = {look(number).marker for number in range(6)}
TASKS = ["mt_bench", "translation", "summarization", "question-answering-long", "math", "rag"]
LONG = "clover2-shared-attention-decoder.trained_on-sharegpt-and-ultrachat-for-300k-steps"


def spread(median):
    return {"median": median, "least": median - 0.1, "most": median + 0.2, "repeats": [median]}


def cell(number, depth, bins):
    rates = [max(0.9 - 0.1 * i - 0.05 * number, 0.0) for i in range(depth)]
    return {
        "tau": 2.5 - 0.1 * number,
        "hit_rate": rates,
        "conditional_hit_rate": [1.0, *rates[1:-1], None][:depth],
        "target_forwards": 100,
        "accepted_histogram": [100 // (depth + 1)] * (depth + 1),
        "by_context": [
            {"from": start, "to": 2 * start or 64, "mean_accepted": number and 2.0 / number}
            for start in [0, *(64 << i for i in range(bins - 1))]
        ],
    }


def report(num_drafts, num_tasks, depth=5, bins=3, name="draft"):
    """Return a report as the plots read it; the last draft has a shorter tree."""
    drafts = [f"{name}-{number}" for number in range(num_drafts)]
    cells = {
        draft: {"overall": cell(number, depth - (number and number + 1 == num_drafts), bins)}
        for number, draft in enumerate(drafts)
    }
    tasks = TASKS[:num_tasks]
    speeds = {
        draft: {
            "overall": {"speedup": spread(1.5 + 0.2 * number)},
            "tasks": {task: {"speedup": spread(0.9 + 0.3 * number)} for task in tasks},
        }
        for number, draft in enumerate(drafts)
    }
    rows = [{"step": 500 * i, "tokens": 2_000_000 * i, "tau": 1 + i / 4} for i in range(1, 5)]
    return {
        "methods": {VANILLA: {}, **cells},
        "tasks": tasks,
        "batch_sizes": [8, 1, 16],
        "speed": dict.fromkeys(("8", "1", "16"), speeds),
        "training": dict.fromkeys(drafts[:2], rows),
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
    plots = plots_of(report(num_drafts, num_tasks, bins=9, name=name))
    assert len(plots) == 7
    for title, draw in plots.items():
        with style():
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
    for title, draw in plots_of(report(2, 1)).items():
        lines = [
            line for axes in draw().axes for line in axes.lines if line.get_marker() in MARKERS
        ]
        assert not any(line.get_clip_on() for line in lines), title


def test_a_plot_that_would_be_a_dot_is_left_out():
    single = report(2, 1, depth=1, bins=1)
    single["training"] = {name: rows[:1] for name, rows in single["training"].items()}
    assert list(plots_of(single)) == [
        "accepted_lengths",
        "speedup_by_task",
        "speedup_by_batch_size",
    ]


def test_plain_decoding_alone_has_no_plots():
    assert plots_of(report(0, 1)) == {}
