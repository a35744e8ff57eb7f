"""What the tests of the command `evaluate` share: a tiny base, a draft, and a finished run."""

import pytest

from clover_jax.models import top_k
from tests.evaluation.command import ROWS, run, write_rows
from tests.tiny_folders import save_tiny_base, save_tiny_draft


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
    return run(folder, folder / "stopped", "--temperature=0.8", "--stop=e", "--stop=a")


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
