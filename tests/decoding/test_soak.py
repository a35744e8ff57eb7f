"""Thousands of mixed rows through 16 slots, killed half-way: nothing lost, doubled or leaked."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from clover_jax.checkpoints.base import fingerprint
from clover_jax.checkpoints.loading import load_base
from clover_jax.drafters import registry
from tests.conftest import rows_in
from tests.decoding.test_rows import rows_of
from tests.tiny_folders import save_draft

ROWS = int(os.environ.get("CLOVER_JAX_SOAK_ROWS", "10000"))
BASE = "builtin:tiny"


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """An untrained head; CLOVER_JAX_SOAK_DRAFT names a trained one."""
    if "CLOVER_JAX_SOAK_DRAFT" in os.environ:
        return os.environ["CLOVER_JAX_SOAK_DRAFT"]
    base = load_base(BASE)
    config = registry.config_for_base("clover2", base.config)
    params = registry.init_params(registry.head(config), base.params, jax.random.key(1))
    folder = tmp_path_factory.mktemp("models") / "draft"
    save_draft(folder, config, params, "chain:4", fingerprint(base), {})
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Rows of many lengths and settings; every 97th is not one."""
    shipped = Path(load_base(BASE).directory) / "prompts.jsonl"
    texts = [row["prompt"] for row in rows_in(shipped)]
    pick = random.Random(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    with path.open("w") as file:
        for index in range(ROWS):
            text = "\n\n\n".join(pick.choices(texts, k=pick.choice((1, 1, 1, 6))))
            row = {"prompt": text[: pick.randint(1, len(text))]}
            row["max_new_tokens"] = pick.choice((1, 2, 4, 8, 24))
            row |= pick.choice(({}, {"temperature": 0.8, "seed": index}, {"stop": ["\n"]}))
            file.write(json.dumps({"prompt": 7} if index % 97 == 96 else row) + "\n")
    return path


def generate(prompts: Path, draft: str, output: Path) -> subprocess.Popen:
    arguments = (f"--base={BASE}", f"--draft={draft}", f"--prompts={prompts}", f"--output={output}")
    command = (sys.executable, "-m", "clover_jax.generate", *arguments, "--batch_size=16")
    with output.with_suffix(".stdout").open("w") as report:
        return subprocess.Popen(command, stdout=report, stderr=subprocess.DEVNULL)


def resident(process: subprocess.Popen) -> int:
    """Return the process's resident memory in kB; 0 when it is ending and has none."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def count_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_long_run_keeps_every_row_and_its_memory(prompts, draft, tmp_path):
    whole, halves = tmp_path / "whole.jsonl", tmp_path / "halves.jsonl"
    process, memory = generate(prompts, draft, whole), {}
    while process.poll() is None:
        now = resident(process)
        if now:
            memory[count_rows(whole)] = now
        time.sleep(1)
    assert process.returncode == 1  # the rows that are none
    report = json.loads(whole.with_suffix(".stdout").read_text().splitlines()[-1])
    assert report["failed"] == ROWS // 97
    assert [row["index"] for row in rows_in(whole)] == list(range(ROWS))
    early = max(m for done, m in memory.items() if ROWS / 10 < done < ROWS / 2)
    late = max(m for done, m in memory.items() if done >= ROWS / 2)
    print(json.dumps({"early_kB": early, "late_kB": late, **report}))
    assert late < 1.05 * early

    process = generate(prompts, draft, halves)
    while count_rows(halves) < ROWS / 2:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert count_rows(halves) < ROWS
    assert generate(prompts, draft, halves).wait() == 1
    assert rows_of(halves) == rows_of(whole)
