"""Figures and plots: definitions on lists counted by hand, whole runs counted again."""

import collections
import itertools
import statistics

import matplotlib
import pytest
from matplotlib.text import Text

from clover_jax.evaluation.options import VANILLA
from clover_jax.evaluation.plots import RC, draw_plots, looks, plots_of
from clover_jax.evaluation.rows import Tally, context_bin, count_repeats
from tests.conftest import rows_in

DEPTHS = {"vanilla": 0, "chain": 2, "short": 1}


def row(output_ids, accepted, prompt=(1, 2), ranks=None, num_cut=0, proposed=3):
    ids = {"output_ids": output_ids, "prompt_ids": list(prompt), "num_cut": num_cut}
    ranks = ranks or [[0] * count for count in accepted]
    drafted = {"accepted": accepted, "proposed": [proposed] * len(accepted), "ranks": ranks}
    return {**ids, **drafted, "finish_reason": "length"}


def tally(*rows, depth=3):
    result = Tally(depth)
    for one in rows:
        result.add_row(one)
    return result


def test_a_position_that_was_never_reached_has_no_conditional_hit_rate():
    figures = tally(row([9] * 3, [1])).to_dict()
    assert figures["hit_rate"] == [1, 0, 0]
    assert figures["conditional_hit_rate"] == [1, 0, None]
    figures = tally(row([9] * 6, [2, 1], ranks=[[0, 3], [1]])).to_dict()
    assert figures["accepted_ranks"] == [[1, 1], [0, 0, 0, 1], []]


def test_the_counters_of_vllm():
    figures = tally(row([9] * 9, [2, 0, 3], proposed=25)).to_dict()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    assert [figures[name] for name in names] == [3, 75, 5, [2, 2, 1]]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + 5 / 3)


def test_acceptance_by_the_length_of_the_context():
    # Contexts before the forwards: 62 + 1, then 63 + 3 and 66 + 1.
    figures = tally(row([9] * 6, [2, 0, 1], prompt=range(62))).to_dict()
    assert figures["by_context"] == [
        {"from": 0, "to": 64, "forwards": 1, "mean_accepted": 2.0},
        {"from": 64, "to": 128, "forwards": 2, "mean_accepted": 0.5},
    ]


def test_bins_and_repeats_of_the_examples():
    assert [context_bin(n) for n in (0, 63, 64, 127, 128)] == [0, 0, 64, 64, 128]
    assert count_repeats(range(1, 10), range(1, 10)) == (2, 2)
    assert count_repeats([1, 2, 3], [7] * 9) == (1, 2)
    # Seven tokens of the prompt and one of the answer are no 8-gram of the answer.
    assert count_repeats([7] * 20, [7]) == (0, 0)


def test_answers_that_loop_are_told_from_the_others():
    loops, does_not = row([7] * 20, [9, 8]), row(list(range(9)), [1, 1, 2])
    repeats = tally(loops, does_not, row([5], []), depth=9).to_dict()["repeats"]
    taus = {"tau_looping": 19 / 2, "tau_not_looping": 8 / 3}
    assert repeats == {"ngrams": 13 + 2, "repeated": 12, "looping_turns": 1, **taus}


def test_copies_are_counted_where_there_are_any_and_turns_one_by_one():
    copies = row([9] * 6, [2, 1]) | {"copied": [2, 0]}
    assert tally(copies, row([9], [])).to_dict()["copied_tokens"] == 2
    assert tally(row([9] * 6, [2, 1])).to_dict()["copied_tokens"] is None
    # Turns count one by one, and so do rows that have none.
    two = {key: [value, value] for key, value in row([9, 9], [1], num_cut=4).items()}
    figures = tally(two, {"error": "bad"}, {"skipped": "long"}).to_dict()
    counted = ("rows", "failed", "skipped", "truncated", "turns", "tokens")
    assert [figures[key] for key in counted] == [3, 1, 1, 1, 2, 4]


def test_plain_decoding_drafts_nothing_and_nothing_decoded_has_no_figures():
    figures = tally(row([9] * 3, [0, 0], proposed=0), depth=0).to_dict()
    assert (figures["tau"], figures["num_drafts"], figures["hit_rate"]) == (1, 0, [])
    figures = tally().to_dict()
    assert (figures["tau"], figures["extra_tokens"], figures["hit_rate"]) == (None, None, [])


@pytest.fixture(scope="module")
def measured(finished, stopped):
    """The reports of two runs: greedy, and sampled with stop strings."""
    return [finished, stopped]


def answers(rows):
    """Yield the output ids and the accepted counts of every answer."""
    for row in rows:
        if "output_ids" not in row:
            continue
        if isinstance(row["finish_reason"], list):
            yield from zip(row["output_ids"], row["accepted"], row["prompt_ids"], strict=True)
        else:
            yield row["output_ids"], row["accepted"], row["prompt_ids"]


def recount(rows, depth):
    """Return the figures of some rows, forward by forward."""
    tokens = forwards = after_prefill = 0
    reached, histogram = [0] * depth, [0] * (depth + 1)
    contexts = collections.defaultdict(list)
    for output_ids, accepted, prompt_ids in answers(rows):
        tokens += len(output_ids)
        after_prefill += len(output_ids) - 1 if output_ids else 0
        length = len(prompt_ids) + 1
        for count in accepted:
            forwards += 1
            histogram[count] += 1
            for position in range(count):
                reached[position] += 1
            start = 0
            while length >= (2 * start or 64):
                start = 2 * start or 64
            contexts[start].append(count)
            length += count + 1
    before = [forwards, *reached]
    return {
        "rows": len(rows),
        "tokens": tokens,
        "target_forwards": forwards,
        "tau": after_prefill / forwards if forwards else None,
        "hit_rate": [hits / forwards for hits in reached] if forwards else [],
        "conditional_hit_rate": [
            hits / before[i] if before[i] else None for i, hits in enumerate(reached)
        ],
        "accepted_histogram": histogram,
        "num_draft_tokens": forwards * depth,
        "num_accepted_tokens": sum(sum(accepted) for _, accepted, _ in answers(rows)),
        "by_context": [
            {
                "from": start,
                "to": 2 * start or 64,
                "forwards": len(counts),
                "mean_accepted": sum(counts) / len(counts),
            }
            for start, counts in sorted(contexts.items())
        ],
    }


def test_tau_hit_rates_and_histograms_of_each_task_and_of_all(measured):
    for finished in measured:
        for name, depth in DEPTHS.items():
            cells = finished.report["methods"][name]
            rows = finished.rows(name)
            parts = {task: [row for row in rows if row["task"] == task] for task in cells["tasks"]}
            assert set(parts) == {"writing", "qa"}
            of_tasks = [(cells["tasks"][task], part) for task, part in parts.items()]
            for cell, chosen in [(cells["overall"], rows), *of_tasks]:
                counted = recount(chosen, depth)
                assert {key: cell[key] for key in counted} == counted


def test_speeds_of_each_repeat_are_all_tokens_over_all_seconds(measured):
    for finished in measured:
        timed = rows_in(finished.output / "legs.jsonl")
        for size in map(str, finished.report["batch_sizes"]):
            for task in ("writing", "qa", None):
                rates = {
                    name: [rate(timed, int(size), name, repeat, task) for repeat in range(2)]
                    for name in DEPTHS
                }
                for name in DEPTHS:
                    speeds = finished.report["speed"][size][name]
                    cell = speeds["overall"] if task is None else speeds["tasks"][task]
                    ratios = [a / b for a, b in zip(rates[name], rates["vanilla"], strict=True)]
                    assert cell["tokens_per_second"]["repeats"] == pytest.approx(rates[name])
                    assert cell["speedup"]["repeats"] == pytest.approx(ratios)
                    assert cell["speedup"]["median"] == pytest.approx(statistics.mean(ratios))


def rate(timed, size, name, repeat, task):
    of = {"batch_size": size, "method": name, "repeat": repeat} | ({"task": task} if task else {})
    chosen = [one for one in timed if of.items() <= one.items()]
    return sum(one["tokens"] for one in chosen) / sum(one["seconds"] for one in chosen)


TASKS = ["mt_bench", "translation", "summarization", "question-answering-long", "math", "rag"]
LONG = "clover2-shared-attention-decoder.trained_on-sharegpt-and-ultrachat-for-300k-steps"


def spread(median):
    return {"median": median, "least": median - 0.1, "most": median + 0.2, "repeats": [median]}


def cell(number, depth):
    rates = [max(0.9 - 0.1 * i - 0.05 * number, 0.0) for i in range(depth)]
    hits = {"hit_rate": rates, "conditional_hit_rate": [1.0, *rates[1:]], "target_forwards": 100}
    counts = {"num_accepted_tokens_per_pos": [round(100 * rate) for rate in rates]}
    return {"tau": 2.5 - 0.1 * number, "rows": 16, **hits, **counts}


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


def test_markers_on_the_axes_are_whole_and_both_panels_end_where_forwards_end():
    axes, _ = plots_of(report(2, 1))["acceptance_by_position"]().axes
    assert not any(line.get_clip_on() for line in axes.lines)
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


def test_a_method_looks_the_same_in_every_report_and_unlike_others_also_without_colors():
    assert looks(["lookup"]) == {"lookup": looks(["clover2", "runs-a", "lookup"])["lookup"]}
    assert looks(["a"])["a"] == looks(["lookup", "recycle", "a"])["a"]
    assert looks(["a", "lookup"])["a"].color != looks(["lookup"])["lookup"].color
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
    names = ["tau", "acceptance_by_position", "speedup", "tau_by_task"]
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    assert all(file.stat().st_size > 1000 for file in files)
