"""Load generators of others ask the server as they are; clover_jax/serving/README.md has the setup.

Each runs where it is on the PATH, from an environment of its own.
"""

import json
import os
import shutil
import subprocess

import pytest

from clover_jax.checkpoints.sources import find_directory
from clover_jax.data.prompts import SHIPPED_PROMPTS
from tests.serving.conftest import KEY

pytestmark = pytest.mark.servers

TINY = find_directory("builtin:tiny")
COUNT, LENGTH = 12, 16  # requests, tokens of each answer


def run(name, *arguments, **environment):
    """Run a program that is on the PATH."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on the PATH")
    env = os.environ | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"} | environment
    env.pop("PYTHONPATH", None)
    subprocess.run([program, *map(str, arguments)], env=env, check=True, timeout=600)


def flags(**values):
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def test_vllm_bench_serve_counts_answers_and_reads_the_accepted_lengths(server, tmp_path):
    before = server.figures()
    run(
        "vllm",
        *("bench", "serve", "--skip-chat-template", "--save-result"),
        *flags(backend="openai", base_url=server.url, model="tiny", tokenizer=TINY),
        *flags(dataset_name="custom", dataset_path=TINY / SHIPPED_PROMPTS),
        *flags(custom_output_len=LENGTH),
        *flags(num_prompts=COUNT, max_concurrency=4, temperature=0),
        *flags(result_dir=tmp_path, result_filename="result.json"),
        VLLM_TARGET_DEVICE="cpu",
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (COUNT, 0)
    assert result["total_output_tokens"] == COUNT * LENGTH

    # It reads vLLM's own names from /metrics, and finds what ours say.
    after = server.figures()
    name = 'vllm:spec_decode_num_{}_total{{model_name="tiny"}}'
    names = name.format("drafts"), name.format("accepted_tokens")
    drafts, accepted = (after[name] - before[name] for name in names)
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)


def test_guidellm_counts_answers(server, tmp_path):
    before = server.figures()
    run(
        *("guidellm", "run", "--disable-console"),
        *flags(backend=f"kind=openai_http,target={server.url},model=tiny,api_key={KEY}"),
        *flags(profile="kind=concurrent,streams=4"),
        *flags(constraint=f"kind=max_requests,count={COUNT}"),
        *flags(tokenizer=f"kind=hf_auto,model={TINY}"),
        *flags(data=f"kind=synthetic_text,prompt_tokens=20,output_tokens={LENGTH}"),
        *flags(output=f"kind=json,path={tmp_path / 'result.json'}"),
    )
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["errored"], made["incomplete"]) == (COUNT, 0, 0)
    name = 'vllm:generation_tokens_total{model_name="tiny"}'
    assert server.figures()[name] - before[name] == COUNT * LENGTH

    # Where two end at once, its totals leave out the one that ended after what it heard of last.
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert tokens["total_sum"] == totals["successful"] * LENGTH
