"""Figures of two tasks in two repeats, counted again from the files by loops of their own."""

import collections
import json
import statistics

import pytest

DEPTHS = {"vanilla": 0, "chain": 2, "short": 1}


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
            for cell, chosen in [
                (cells["overall"], rows),
                *((cells["tasks"][task], part) for task, part in parts.items()),
            ]:
                counted = recount(chosen, depth)
                assert {key: cell[key] for key in counted} == counted


def test_overall_is_a_micro_average(measured):
    for finished in measured:
        for name in DEPTHS:
            cells = finished.report["methods"][name]
            tasks = cells["tasks"].values()
            forwards = [cell["target_forwards"] for cell in tasks]
            tau = sum(cell["tau"] * n for cell, n in zip(tasks, forwards, strict=True) if n)
            assert cells["overall"]["tau"] == pytest.approx(tau / sum(forwards))


def test_equal_rows_are_those_whose_ids_are_the_same(measured):
    for finished in measured:
        plain = {row["row"]: row["output_ids"] for row in finished.rows("vanilla")}
        for name in ("chain", "short"):
            equality = finished.report["methods"][name]["overall"]["equality"]
            same = [row["output_ids"] == plain[row["row"]] for row in finished.rows(name)]
            assert (equality["equal"], equality["compared"]) == (sum(same), len(same))


def test_speeds_of_each_repeat_are_all_tokens_over_all_seconds(measured):
    for finished in measured:
        lines = (finished.output / "legs.jsonl").read_text().splitlines()
        timed = [json.loads(line) for line in lines]
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
    chosen = [
        one
        for one in timed
        if (one["batch_size"], one["method"], one["repeat"]) == (size, name, repeat)
        and task in (None, one["task"])
    ]
    return sum(one["tokens"] for one in chosen) / sum(one["seconds"] for one in chosen)
