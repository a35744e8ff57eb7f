"""Jobs that share a file of prompts: together they write the rows of one job, or say what lacks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY
from tests.generation.test_rows import ragged_rows, without_times


def rows_of(path):
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


@pytest.fixture
def shards(command, prompts_file, draft, tmp_path):
    """Run a job over seven prompts, whole or with --shard, or --join: (status, stderr)."""
    rows = [*ragged_rows(6), {"prompt": "bad", "temperature": -1}]
    prompts = prompts_file(*rows)

    def run(output, *argv):
        decoding = [f"--prompts={prompts}", f"--draft={draft}", "--batch_size=2", "--seed=3"]
        decoding += ["--max_new_tokens=6", "--temperature=0.8"]
        given = [] if "--join" in argv else decoding
        status, _, error = command(f"--output={tmp_path / output}", *given, *argv)
        return status, error

    return run


def test_jobs_that_share_the_rows_write_those_of_one(shards, tmp_path):
    assert shards("one.jsonl")[0] == 1
    for index in range(3):
        assert shards("out.jsonl", f"--shard={index}/3")[0] == int(index == 2), "the bad row"
    assert len(rows_of(tmp_path / "out.1-of-3.jsonl")) == 2
    assert shards("out.jsonl", "--join")[0] == 1

    assert rows_of(tmp_path / "out.jsonl") == rows_of(tmp_path / "one.jsonl")
    manifests = [
        json.loads((tmp_path / f"{name}.jsonl.manifest.json").read_text())
        for name in ("out", "one")
    ]
    assert manifests[0].pop("seconds") > 0 < manifests[1].pop("seconds")
    assert manifests[0] == manifests[1]
    # The command of one job finds all of its rows there.
    assert "7 rows are in" in shards("out.jsonl")[1]


@pytest.mark.parametrize("shard", ["3/3", "1", "-1/2", "0/0", "a/b"])
def test_what_is_no_shard_is_refused(shards, shard):
    status, error = shards("out.jsonl", f"--shard={shard}")
    assert status == 2
    assert f"--shard={shard} must be I/N with I from 0 to N - 1, such as 0/4" in error


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_real_processes_of_which_one_is_killed_write_the_rows_of_one(
    base, draft, prompts_file, tmp_path, count
):
    prompts = prompts_file(*ragged_rows(6) * 4)

    def start(output, *argv):
        command = [sys.executable, "-m", "clover_jax.generate", f"--output={tmp_path / output}"]
        if "--join" not in argv:
            command += [f"--base={base}", f"--prompts={prompts}", f"--draft={draft}"]
            command += ["--batch_size=2", "--max_new_tokens=40", "--temperature=0.8"]
        return subprocess.Popen(
            [*command, *argv],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert start("one.jsonl").wait() == 0
    jobs = [start("out.jsonl", f"--shard={index}/{count}") for index in range(count)]
    # One dies with some of its rows written.
    begun = tmp_path / f"out.1-of-{count}.jsonl"
    while jobs[1].poll() is None and not (begun.exists() and begun.stat().st_size):
        time.sleep(0.005)
    jobs[1].send_signal(signal.SIGKILL)
    statuses = [job.wait() for job in jobs]
    assert statuses[1] == -signal.SIGKILL
    assert statuses[:1] + statuses[2:] == [0] * (count - 1)
    assert start("out.jsonl", "--join").wait() == 2

    assert start("out.jsonl", f"--shard=1/{count}").wait() == 0
    assert start("out.jsonl", "--join").wait() == 0
    assert rows_of(tmp_path / "out.jsonl") == rows_of(tmp_path / "one.jsonl")
