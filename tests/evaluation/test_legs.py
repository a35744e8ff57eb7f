"""Times: speed-ups are ratios within a repeat; what is done is known after a stop."""

import dataclasses

import pytest

from clover_jax.evaluation.legs import LEGS, Leg, LegJournal, speed, split_turns, throughputs

HERE = {"mesh": None, "hardware": {"device": "cpu", "num_devices": 1}}


def leg(method="a", repeat=0, tokens=100, seconds=2.0, task="qa", session=0):
    return Leg(4, task, repeat, method, 10, tokens, seconds, 0.0, [], session, HERE, None)


def test_throughput_is_all_tokens_over_all_seconds():
    # Not the mean of 50 and 200.
    legs = [leg(tokens=100, seconds=2.0), leg(tokens=200, seconds=1.0, task="rag")]
    assert throughputs(legs) == {0: 100.0}


def test_speed_up_is_the_median_of_the_ratios_within_repeats():
    plain = [leg("vanilla", repeat, seconds=s) for repeat, s in enumerate([2.0, 4.0, 1.0])]
    drafted = [leg("a", repeat, seconds=s) for repeat, s in enumerate([1.0, 1.0, 1.0])]
    found = speed(drafted, plain)["speedup"]
    assert (found["median"], found["least"], found["most"]) == (2.0, 1.0, 4.0)
    assert found["repeats"] == (2.0, 4.0, 1.0)
    assert speed([], plain)["speedup"] is None


def test_the_journal_survives_a_torn_line(tmp_path):
    journal = LegJournal(tmp_path, HERE, overwrite=False)
    assert journal.session == 0
    journal.add(leg())
    with (tmp_path / LEGS).open("a") as file:
        file.write('{"batch_size": 4, "ta')
    again = LegJournal(tmp_path, HERE, overwrite=False)
    assert again.session == 1
    assert leg().key in again
    assert leg(repeat=1).key not in again
    again.add(leg(repeat=1))
    assert LegJournal(tmp_path, HERE, overwrite=False).select(method="a") == [leg(), leg(repeat=1)]
    assert LegJournal(tmp_path, HERE, overwrite=True).select() == []


def test_legs_of_other_conditions_are_measured_again(tmp_path):
    LegJournal(tmp_path, HERE, overwrite=False).add(leg())
    elsewhere = HERE | {"mesh": "data=2"}
    there = LegJournal(tmp_path, elsewhere, overwrite=False)
    assert leg().key not in there
    assert there.num_dropped == 1
    assert leg().key not in LegJournal(tmp_path, HERE, overwrite=False)  # and are gone


def test_turns_that_a_stop_has_split_are_listed():
    legs = [leg("vanilla"), leg("a"), leg("vanilla", 1), leg("a", 1, session=1)]
    assert split_turns(legs) == [{"batch_size": 4, "task": "qa", "repeat": 1}]
    assert split_turns([dataclasses.replace(one, session=3) for one in legs]) == []


def test_a_leg_without_time_has_no_throughput():
    assert throughputs([leg(tokens=0, seconds=0.0)]) == {}
    assert speed([leg()], [])["tokens_per_second"]["median"] == pytest.approx(50)
