"""What compilers make of a whole step; those of absent hardware must be installed."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from clover_jax.benchmark import compiled
from clover_jax.benchmark.subject import shape_subject
from clover_jax.benchmark.targets import CHIPS, Target
from tests.conftest import REPOSITORY

COMPILERS = {"tpu-v6e:2x2": "libtpu", "gpu-h200": "jax_plugins.xla_cuda13"}


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_float32_is_compiled_as_it_is_decoded(monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda target: jax.devices()[:1])
    subject = shape_subject("shape:64x1x96", "none", None, jnp.dtype("float32"))
    here = Target("here", "cpu", CHIPS["v6e"], "1")
    with jax.default_matmul_precision("default"):
        _, text = compiled.compile_step(subject, here, None, batch=1, context=10)
    products = [line for line in text.splitlines() if " dot(" in line]
    assert products
    assert all("operand_precision={highest,highest}" in line for line in products)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("batch", "draft"), [(1, "random:clover2"), (16, "random:clover2"), (1, "none")]
)
@pytest.mark.parametrize("target", COMPILERS)
def test_a_compiled_step_copies_no_cache_and_no_weight(target, batch, draft):
    if not is_installed(COMPILERS[target]):
        pytest.skip(f"{COMPILERS[target]} is not installed")
    flags = [f"--target={target}", "--base=shape:llama3-8b:1", "--context=2000"]
    flags += [f"--batch_size={batch}", f"--draft={draft}"]
    # The precision that the other tests ask for widens a GPU's bfloat16 products.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_DEFAULT_MATMUL_PRECISION"}
    finished = subprocess.run(
        [sys.executable, "-m", "clover_jax.bench", *flags],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout.splitlines()[-1])
    assert figures["cache_copies"] == []
    assert figures["weight_copies"] == []
    assert figures["moved_over_floor"] < 2
    # At batch 16 one layer at work holds more than a hundredth of so few layers' weights on a GPU.
    most = 0.01 if batch == 1 or target.startswith("tpu") else 0.03
    assert 0 < figures["temporary_value_bytes"] < most * figures["weight_bytes"]
