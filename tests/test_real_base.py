"""A published base, whose norms and states are not those of our small ones.

CLOVER_JAX_REAL_BASE=DIR names its Hugging Face folder; figures were measured on Gemma 3 270M
(experiments/results/real_base.md). The text of this machine's Python library trains the heads.
"""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from clover_jax import generate, train
from clover_jax.checkpoints.loading import load_base
from clover_jax.drafters.registry import DRAFTERS
from tests.conftest import rows_in, run_command
from tests.torch_pairs import our_logits, torch_logits

BASE = os.environ.get("CLOVER_JAX_REAL_BASE", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not BASE, reason="CLOVER_JAX_REAL_BASE names no folder"),
]
PROMPTS = (
    "The first time I saw the sea, ",
    "Question: what is 17 times 6?\nAnswer:",
    'def mean(values):\n    """Return the mean of values."""\n',
    "Berlin, Paris, Rome, Berlin, Paris, Rome, Berlin,",
)
VOCABULARY, LENGTH = 8192, 32


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def decoded(capsys, prompts, output, *flags):
    """Return the ids of every prompt's greedy text."""
    sizes = (f"--max_new_tokens={LENGTH}", "--batch_size=4", "--ignore_eos", "--dtype=float32")
    named = (f"--base={BASE}", f"--prompts={prompts}", f"--output={output}")
    assert run_command(capsys, generate, *named, *sizes, *flags)[0] == 0
    return [row["output_ids"] for row in rows_in(output)]


@pytest.fixture
def plain(capsys, prompts, tmp_path):
    return decoded(capsys, prompts, tmp_path / "plain.jsonl", "--draft=none")


@pytest.mark.parity
def test_logits_and_greedy_text_are_those_of_transformers(plain):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    base, tokenizer = load_base(BASE), AutoTokenizer.from_pretrained(BASE)
    for text, ours in zip(PROMPTS, plain, strict=True):
        ids = tokenizer(text).input_ids + ours
        expected = torch_logits(model, ids)
        found = our_logits(base, [ids])[0]
        print(f"largest difference {np.abs(found - expected).max():.2e}")
        np.testing.assert_allclose(found, expected, atol=2e-3, rtol=1e-4)
        assert expected[-len(ours) - 1 : -1].argmax(-1).tolist() == ours


@pytest.mark.parametrize("draft", ["lookup", "recycle"])
def test_drafts_without_a_head_leave_the_text_as_it_is(capsys, prompts, tmp_path, plain, draft):
    assert decoded(capsys, prompts, tmp_path / "out.jsonl", f"--draft={draft}") == plain


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_head_begins_no_worse_than_guessing_and_leaves_the_text_as_it_is(
    capsys, prompts, tmp_path, plain, drafter
):
    workdir = tmp_path / "run"
    sizes = ("--batch_size=2", "--seq_len=128", "--steps=4", "--log_every=1", "--eval_every=0")
    flags = (f"--drafter={drafter}", f"--draft_vocab={VOCABULARY}", "--learning_rate=1e-4", *sizes)
    data = (f"--base={BASE}", "--data=builtin:python", f"--workdir={workdir}")
    assert run_command(capsys, train, *data, *flags)[0] == 0

    # A step is logged with the loss before its update.
    first = rows_in(Path(workdir) / "metrics.jsonl")[0]
    assert max(first["soft_ce"]) < math.log(VOCABULARY) + 1.0, first["soft_ce"]
    assert decoded(capsys, prompts, tmp_path / "out.jsonl", f"--draft={workdir}") == plain
