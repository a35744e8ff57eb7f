"""The command `evaluate`, run in this process on prompts of two tasks, and finished runs of it."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from clover_jax import cli, evaluate
from clover_jax.decoding.sampling_config import GREEDY
from clover_jax.evaluation import parts
from clover_jax.models import top_k
from tests.conftest import rows_in
from tests.tiny_folders import save_tiny_base, save_tiny_draft

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["the hat", "and the cat"]},
    {"category": "qa", "turns": ["he"]},
    {"category": "writing", "turns": ["at the " * 80]},
    {"category": "qa", "turns": ["is it?"]},
]


_stage_times, _measure = {}, parts.measure


def measure_once(method, engine, requests):
    """Compile and time the parts of a step once for like engines, not in every test."""
    # Whatever rows are sampled and however long they are: test_parts.py is about times.
    key = dataclasses.replace(engine.config, sampling=GREEDY), engine.batch_size
    if key not in _stage_times:
        _stage_times[key] = _measure(method, engine, requests)
    return _stage_times[key]


def write_rows(folder, name, rows):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Finished(NamedTuple):
    """A run of the command, in this process."""

    status: int
    out: list[str]
    err: str
    output: Path

    @property
    def report(self):
        return json.loads((self.output / "report.json").read_text())

    @property
    def result(self):
        return json.loads(self.out[-1])

    def rows(self, name):
        return rows_in(self.output / "rows" / f"{name}.jsonl")


def run(folder, output, *argv, prompts="bench.jsonl"):
    """Measure one draft with two trees; `argv` may ask for baselines."""
    arguments = [
        *(f"--base={folder / 'base'}", f"--prompts={folder / prompts}"),
        *(f"--drafts=chain={folder / 'work'},short={folder / 'work'}", "--tree=short=chain:1"),
        *(f"--output={output}", "--batch_size=2", "--max_new_tokens=9", "--repeats=2"),
        *("--context_overflow=truncate_left", "--baselines=none", *map(str, argv)),
    ]
    out, err, patching = io.StringIO(), io.StringIO(), pytest.MonkeyPatch.context()
    shown = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with patching as patch, shown[0], shown[1]:
        patch.setattr(parts, "measure", measure_once)
        status = cli.run(evaluate.main, evaluate.define_flags, arguments)
    return Finished(status, out.getvalue().splitlines(), err.getvalue(), output)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    base = save_tiny_base(folder / "base")
    save_tiny_draft(folder / "work" / "draft", base)
    write_rows(folder, "bench.jsonl", ROWS)
    return folder


@pytest.fixture(scope="session")
def finished(folder):
    """A run that was never stopped, at two batch sizes."""
    return run(folder, folder / "out", "--batch_sizes=1")


@pytest.fixture(scope="session")
def stopped(folder):
    """A sampled run with stop strings, which cut more answers."""
    flags = ("--temperature=0.8", "--draft_sampling=topk", "--stop=e", "--stop=a")
    return run(folder, folder / "stopped", *flags)


@pytest.fixture(scope="session")
def copying(folder):
    """A run with nothing but the baseline of lookup."""
    rows = [{"category": "qa", "turns": ["he", "he"]}, {"category": "rag", "prompt": "a b a b"}]
    write_rows(folder, "few.jsonl", rows)
    few = ("--drafts=", "--tree=none", "--baselines=lookup", "--repeats=1", "--max_new_tokens=24")
    return run(folder, folder / "copying", *few, prompts="few.jsonl")


@pytest.fixture
def logits_specs(monkeypatch):
    """How logits lie on the mesh in use, or None, each time that a traced program asks."""
    found, find = [], top_k.logits_spec

    def finding(*arguments, **options):
        found.append(find(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(top_k, "logits_spec", finding)
    return found
