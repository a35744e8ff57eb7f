"""The definitions, on accepted lists that are counted by hand."""

import pytest

from clover_jax.evaluation.rows import Tally, context_bin, count_repeats


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
        result.add(one)
    return result


def test_tau_leaves_out_what_prefill_gave():
    # 1 + (2+1) + (0+1) + (3+1) tokens, the last forward cut by one.
    figures = tally(row([9] * 8, [2, 0, 3])).to_dict()
    assert figures["tau"] == pytest.approx(7 / 3)
    assert figures["extra_tokens"] == pytest.approx(4 / 3)
    assert (figures["tokens"], figures["target_forwards"]) == (8, 3)


def test_hit_rates_of_four_forwards():
    figures = tally(row([9] * 9, [2, 0, 3]), row([9] * 3, [1])).to_dict()
    assert figures["hit_rate"] == [3 / 4, 2 / 4, 1 / 4]
    assert figures["conditional_hit_rate"] == [3 / 4, 2 / 3, 1 / 2]
    assert figures["accepted_histogram"] == [1, 1, 1, 1]


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
