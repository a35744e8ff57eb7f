"""`--attention=auto`: the kernel is compared on the run's shapes, and left out where it fails."""

import dataclasses
from pathlib import Path

import jax
import pytest

from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.loading.models import Models
from clover_jax.models import attention_kernel
from clover_jax.pretrained.base import BaseModel
from clover_jax.tree_search import attention_trial
from clover_jax.tree_search.attention_trial import with_attention
from tests.tiny_models import TINY, random_base


@pytest.fixture
def models(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attention_trial, "ROUNDS", 3)
    config = dataclasses.replace(TINY, num_layers=1)
    base = BaseModel(config, random_base(config), Path(), "random")
    return Models(base, None, None, TreeConfig.root_only())


def test_auto_is_xla_where_no_kernel_runs_compiled(models):
    assert with_attention(models, "auto", 2) is models
    for name in ("xla", "pallas"):
        assert with_attention(models, name, 2, platform="tpu") is models


def test_the_faster_way_that_agrees_is_taken_and_remembered(models, monkeypatch, capsys):
    chosen = with_attention(models, "auto", 2, platform="tpu")
    line = capsys.readouterr().err
    # Interpreted, the kernel may be either.
    assert f"attention auto: {chosen.attention}; a step takes " in line
    assert dataclasses.replace(chosen, attention="xla") == models

    monkeypatch.setattr(attention_trial, "compare", None)
    assert with_attention(models, "auto", 2, platform="tpu").attention == chosen.attention
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("fault", ["differs by 1.0e+00", "does not run here: no such operation"])
def test_a_kernel_that_fails_is_reported_in_one_line_and_left_out(
    models, monkeypatch, capsys, fault
):
    read_cache = attention_kernel.read_cache

    def faulty(query, *rest, **options):
        if "no such" in fault:
            raise NotImplementedError("no such operation\n  at some length")
        softmax = read_cache(query, *rest, **options)
        return jax.tree.map(lambda x: x * 0, softmax)

    monkeypatch.setattr(attention_kernel, "read_cache", faulty)
    assert with_attention(models, "auto", 2, platform="tpu").attention == "xla"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attention auto: xla; pallas " + fault.split("1.0e")[0])


@pytest.mark.accelerator
def test_the_kernel_agrees_with_xla_on_this_device():
    # cuDNN takes 16 bits; on a CPU the kernel for TPU is interpreted.
    kernel, dtype = (
        ("cudnn", "bfloat16") if jax.default_backend() == "gpu" else ("pallas", "float32")
    )
    config = dataclasses.replace(TINY, num_layers=1, head_dim=128)
    params = jax.tree.map(lambda x: x.astype(dtype), random_base(config))
    models = Models(BaseModel(config, params, Path(), "random"), None, None, TreeConfig.root_only())
    apart = attention_trial._disagreement(models, 3, 300, kernel)
    assert apart < attention_trial.APART[dtype]
