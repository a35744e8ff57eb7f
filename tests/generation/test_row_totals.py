"""RowTotals over rows: tau leaves prefill out, turns count one by one."""

import pytest

from clover_jax.generation.row_totals import RowTotals


def summed(*rows):
    return RowTotals(rows)


def row(output_ids, accepted, reason="length"):
    return {"index": 0, "output_ids": output_ids, "accepted": accepted, "finish_reason": reason}


def test_rows_turns_and_failures_are_counted():
    figures = summed(
        row([1, 2, 3, 4], [2]),
        row([[1, 2], [], [5]], [[0], [3], []], ["eos", "stop", "length"]),
        {"index": 2, "error": "bad"},
        {"index": 3, "skipped": "long"},
    )
    assert figures.to_dict() == {
        "tau": pytest.approx(4 / 3),
        "tokens": 7,
        "target_forwards": 3,
        "accepted_histogram": [1, 0, 1, 1],
        "rows": 4,
        "failed": 1,
        "skipped": 1,
    }
    assert figures.summary(12.4) == (
        "tau 1.33, 7 tokens in 3 forwards, 12 tokens/s; "
        "drafted tokens accepted a forward: 0: 33 %, 2: 33 %, 3: 33 %"
    )


def test_nothing_decoded_has_no_tau():
    assert summed().tau is None
    assert summed(row([1], [])).summary(None) == "tau none, 1 tokens in 0 forwards"


def test_plain_decoding_shows_no_shares():
    assert summed(row([1, 2, 3], [0, 0])).summary(None) == "tau 1.00, 3 tokens in 2 forwards"
