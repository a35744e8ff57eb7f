"""launch/accelerator's program, rehearsed on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from experiments.accelerator import far_from_floor
from tests.conftest import REPOSITORY


def rehearse(folder, seconds):
    """Return the report's JSON, its page and what was printed."""
    command = "-m", "experiments.accelerator", "--rehearse", f"--output={folder}"
    finished = subprocess.run(
        [sys.executable, *command, f"--seconds={seconds}"],
        env=os.environ,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads((folder / "cpu.json").read_text()), (folder / "cpu.md").read_text(), finished


def test_when_the_time_is_over_it_ends_with_a_page_of_what_it_has(tmp_path):
    report, page, finished = rehearse(tmp_path, 9)
    stages = report["stages"]
    assert {"tests", "train", "evaluate", "clover_lr, batch 16, pallas"} < set(stages)
    assert {row["status"] for row in stages.values()} & {"not begun", "stopped"}
    assert all(f"| {name} | {row['status']} |" in page for name, row in stages.items())
    assert f"{tmp_path}/cpu.md" in finished.stdout


@pytest.mark.slow
def test_with_time_enough_everything_is_measured(tmp_path):
    report, page, finished = rehearse(tmp_path, 3600)
    for name, row in report["stages"].items():
        # Only an environment with the TPU's compiler has figures ahead of time.
        compiled = "no compiler for it" not in row.get("said", "")
        assert row["status"] == ("done" if compiled else "failed"), (name, row)
        assert compiled or name.endswith("ahead of time")
    assert "passed" in report["stages"]["tests"]["said"]
    assert report["stages"]["clover2, batch 16, pallas"]["attention"] == "pallas"
    assert "tau " in page
    assert len(report["far_from_floor"]) == 3
    assert all(line in page and line in finished.stdout for line in report["far_from_floor"])


def test_the_parts_that_lose_most_time_are_named_once_each():
    def timed(**milliseconds):
        parts = {
            name.replace("_", " "): {
                "ms": ms,
                "floor_ms": floor,
                "over_floor": floor and ms / floor,
            }
            for name, (ms, floor) in milliseconds.items()
        }
        return {"status": "done", "parts": parts}

    stages = {
        "tests": {"status": "done", "said": "4 passed"},
        "a": timed(step=(90, 10), draft_level_1=(80, 1), verify=(20, 10), accept=(3, 0)),
        "b": timed(verify=(24, 10), draft=(9, 8), absorb=(5, 4.5), plain_step=(9, 9)),
    }
    assert far_from_floor(stages) == [
        "verify (b): 24.000 ms, 2.40 x its floor",
        "accept (a): 3.000 ms",
        "draft (b): 9.000 ms, 1.12 x its floor",
    ]
