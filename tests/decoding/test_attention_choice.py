"""`--attention=auto`: the kernel is compared at the run's shapes, and left out where it fails."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.decoding import race
from clover_jax.decoding.cache_reading import cache_reader
from clover_jax.decoding.models import Models
from clover_jax.decoding.race import with_attention
from clover_jax.decoding.tree_config import TreeConfig
from tests.tiny_models import TINY, random_base


@pytest.fixture
def models():
    config = dataclasses.replace(TINY, num_layers=1)
    base = BaseModel(config, random_base(config), Path(), "random")
    return Models(base, None, None, TreeConfig.root_only())


@pytest.fixture
def timed(monkeypatch):
    """Give the seconds of both ways instead of measuring them."""
    return lambda **seconds: monkeypatch.setattr(race, "time_in_turns", lambda *_, **__: seconds)


def test_auto_is_xla_where_no_kernel_runs_compiled(models):
    assert with_attention(models, "auto", 2) is models
    for name in ("xla", "pallas"):
        assert with_attention(models, name, 2, platform="tpu") is models


@pytest.mark.parametrize(("by_kernel", "chosen"), [(1e-5, "pallas"), (3e-5, "xla")])
def test_the_faster_way_that_agrees_is_used(models, timed, capsys, by_kernel, chosen):
    timed(xla=2e-5, pallas=by_kernel)
    expected = dataclasses.replace(models, attention=chosen)
    assert with_attention(models, "auto", 2, platform="tpu") == expected
    line = f"attention: {chosen} (xla 20 us a layer, pallas {1e6 * by_kernel:.0f} us a layer)\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("fault", ["differs by ", "does not run here: no such operation"])
def test_a_kernel_that_fails_is_reported_in_one_line_and_left_out(
    models, timed, monkeypatch, capsys, fault
):
    timed(xla=2e-5, pallas=1e-5)

    def faulty(*arguments):
        if "no such" in fault:
            raise NotImplementedError("no such operation\n  at some length")
        return jax.tree.map(lambda x: x * 0, cache_reader("pallas")(*arguments))

    monkeypatch.setattr(race, "cache_reader", {"xla": None, "pallas": faulty}.get)
    assert with_attention(models, "auto", 2, platform="tpu").attention == "xla"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"attention: xla (pallas {fault}")


@pytest.mark.accelerator
def test_the_kernel_agrees_with_xla_on_this_device():
    # cuDNN takes 16 bits; on a CPU the kernel for TPU is interpreted.
    kernel, dtype = (
        ("cudnn", "bfloat16") if jax.default_backend() == "gpu" else ("pallas", "float32")
    )
    config = dataclasses.replace(TINY, num_layers=1, head_dim=128)
    params = jax.tree.map(lambda x: x.astype(dtype), random_base(config))
    models = Models(BaseModel(config, params, Path(), "random"), None, None, TreeConfig.root_only())
    by_xla, by_kernel = (
        run().astype(float) for run in race._attention_runs(models, 3, kernel).values()
    )
    assert jnp.abs(by_xla - by_kernel).max() < race.APART[dtype]
