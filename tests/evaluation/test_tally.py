"""The definitions, on accepted lists counted by hand, and whole runs counted again."""

import collections
import json
import statistics

import pytest

from clover_jax.evaluation.rows import Tally, context_bin, count_repeats

DEPTHS = {"vanilla": 0, "chain": 2, "short": 1}


def row(output_ids, accepted, prompt=(1, 2), ranks=None, num_cut=0, proposed=3):
    return {
        "output_ids": output_ids,
        "prompt_ids": list(prompt),
        "accepted": accepted,
        "proposed": [proposed] * len(accepted),
        "ranks": ranks or [[0] * count for count in accepted],
        "num_cut": num_cut,
        "finish_reason": "length",
    }


def tally(*rows, depth=3):
    result = Tally(depth)
    for one in rows:
        result.add_row(one)
    return result


def test_a_position_that_was_never_reached_has_no_conditional_hit_rate():
    figures = tally(row([9] * 3, [1])).to_dict()
    assert figures["hit_rate"] == [1, 0, 0]
    assert figures["conditional_hit_rate"] == [1, 0, None]


def test_the_counters_of_vllm():
    figures = tally(row([9] * 9, [2, 0, 3], proposed=25)).to_dict()
    assert figures["num_drafts"] == 3
    assert figures["num_draft_tokens"] == 75
    assert figures["num_accepted_tokens"] == 5
    assert figures["num_accepted_tokens_per_pos"] == [2, 2, 1]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + 5 / 3)


def test_ranks_of_accepted_tokens_by_position():
    figures = tally(row([9] * 6, [2, 1], ranks=[[0, 3], [1]])).to_dict()
    assert figures["accepted_ranks"] == [[1, 1], [0, 0, 0, 1], []]


def test_acceptance_by_the_length_of_the_context():
    # Contexts before the forwards: 62 + 1, then 63 + 3 and 66 + 1.
    figures = tally(row([9] * 6, [2, 0, 1], prompt=range(62))).to_dict()
    assert figures["by_context"] == [
        {"from": 0, "to": 64, "forwards": 1, "mean_accepted": 2.0},
        {"from": 64, "to": 128, "forwards": 2, "mean_accepted": 0.5},
    ]


def test_the_bins_of_the_example():
    assert [context_bin(n) for n in (0, 63, 64, 127, 128)] == [0, 0, 64, 64, 128]


def test_repeats_of_the_example():
    assert count_repeats(range(1, 10), range(1, 10)) == (2, 2)
    assert count_repeats([1, 2, 3], [7] * 9) == (1, 2)
    # Seven tokens of the prompt and one of the answer are no 8-gram of the answer.
    assert count_repeats([7] * 20, [7]) == (0, 0)


def test_answers_that_loop_are_told_from_the_others():
    loops, does_not = row([7] * 20, [9, 8]), row(list(range(9)), [1, 1, 2])
    repeats = tally(loops, does_not, row([5], []), depth=9).to_dict()["repeats"]
    assert repeats == {
        "ngrams": 13 + 2,
        "repeated": 12,
        "looping_turns": 1,
        "tau_looping": 19 / 2,
        "tau_not_looping": 8 / 3,
    }


def test_copies_are_counted_where_there_are_any():
    copies = row([9] * 6, [2, 1]) | {"copied": [2, 0]}
    assert tally(copies, row([9], [])).to_dict()["copied_tokens"] == 2
    assert tally(row([9] * 6, [2, 1])).to_dict()["copied_tokens"] is None


def test_turns_count_one_by_one_and_rows_that_have_none_are_counted():
    two = {key: [value, value] for key, value in row([9, 9], [1], num_cut=4).items()}
    figures = tally(two, {"error": "bad"}, {"skipped": "long"}).to_dict()
    counted = ("rows", "failed", "skipped", "truncated", "turns", "tokens")
    assert [figures[key] for key in counted] == [3, 1, 1, 1, 2, 4]


def test_plain_decoding_drafts_nothing():
    figures = tally(row([9] * 3, [0, 0], proposed=0), depth=0).to_dict()
    assert (figures["tau"], figures["num_drafts"], figures["hit_rate"]) == (1, 0, [])


def test_nothing_decoded_has_no_figures():
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
