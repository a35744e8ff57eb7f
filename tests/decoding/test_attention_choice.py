"""`--attention`: kernels read the cache as XLA's program does; the choice of auto."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.decoding import race
from clover_jax.decoding.cache_reading import cache_reader, resolve_attention
from clover_jax.decoding.models import Models
from clover_jax.decoding.race import with_attention
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights, speculate_and_verify
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.errors import UserError
from tests.tiny_models import SMALL_TREE, TINY, decoded, random_base, random_head, random_prompts

SMALL = dataclasses.replace(TINY, num_layers=1)


def by_both(tree, name="clover2", base=SMALL):
    """Return [(text, accepted lengths)] that the kernel gives, and XLA."""
    for attention in ("pallas", "xla"):
        options = {"batch_size": 2, "attention": attention}
        rows = decoded(random_head(base, name), tree, random_prompts(2), 12, base, **options)
        yield [(row.output_ids, row.accepted) for row in rows]


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("medusa", SMALL_TREE),  # no attention of its own, so only the base's is compiled
        pytest.param("clover2", SMALL_TREE, marks=pytest.mark.slow),
        pytest.param("clover_lr", "dynamic:9:3", marks=pytest.mark.slow),
        pytest.param("eagle", "paper25", marks=pytest.mark.slow),
        pytest.param("dflash2", "paper25", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_writes_the_text_that_xla_writes(name, tree):
    by_kernel, by_xla = by_both(tree, name)
    assert by_kernel == by_xla


def test_the_kernel_leaves_no_trace_in_other_programs():
    root = TreeConfig.root_only()
    state = empty_state(SMALL, None, root, 2, 64, 8, jnp.float32)

    def program(config):
        step = functools.partial(speculate_and_verify, config)
        return jax.jit(step).lower(Weights(random_base(SMALL), {}), state).as_text()

    usual = StepConfig(SMALL, None, root)
    before = program(usual)
    assert "read_cache" in program(dataclasses.replace(usual, attention="pallas"))
    assert program(usual) == before
    assert "read_cache" not in before


# A kernel is split by hand: each device reads the rows and heads that it has.
ON_A_MESH = """
import json, sys
from clover_jax.decoding.engine import Engine
from clover_jax.models.meshes import make_mesh, parse_mesh
from tests.tiny_models import SMALL_TREE, TINY, decode_all, random_base, random_head, random_prompts

head, params = random_head()
for shape, attention in (("", "xla"), ("data=2,tensor=2", "pallas"), ("tensor=4", "pallas")):
    mesh = make_mesh(parse_mesh(shape, 4)) if shape else None
    engine = Engine(TINY, head, SMALL_TREE, batch_size=3, mesh=mesh, attention=attention)
    rows = decode_all(engine, random_base(), params, random_prompts(6), 12)
    print(json.dumps([[row.output_ids, row.accepted] for row in rows]))
"""


@pytest.mark.slow
def test_on_a_mesh_the_kernel_reads_the_rows_and_heads_of_each_device(run_python):
    alone, *split = run_python(ON_A_MESH, devices=4).splitlines()
    assert split == [alone] * 2


@pytest.mark.slow
def test_the_kernel_knows_windows_and_soft_caps():
    base = dataclasses.replace(TINY, num_layers=2, sliding_window=7, score_cap=1.0)
    by_kernel, by_xla = by_both(SMALL_TREE, base=base)
    assert by_kernel == by_xla


def test_each_platform_has_its_own_kernel():
    assert resolve_attention("auto", "cuda") == resolve_attention("xla", "cuda") == "xla"
    assert resolve_attention("pallas", "tpu") == "pallas"
    with pytest.raises(UserError, match="--attention=pallas is a kernel for TPU"):
        resolve_attention("pallas", "cuda")
    assert resolve_attention("cudnn", "cuda") == "cudnn"
    with pytest.raises(UserError, match="--attention=cudnn is for NVIDIA's GPUs; tpu takes xla"):
        resolve_attention("cudnn", "tpu")


def plain_models(config, params):
    return Models(BaseModel(config, params, Path(), "random"), None, None, TreeConfig.root_only())


@pytest.fixture
def models():
    return plain_models(SMALL, random_base(SMALL))


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
    on_gpu = jax.default_backend() == "gpu"
    kernel, dtype = ("cudnn", "bfloat16") if on_gpu else ("pallas", "float32")
    config = dataclasses.replace(TINY, num_layers=1, head_dim=128)
    params = jax.tree.map(lambda x: x.astype(dtype), random_base(config))
    runs = race._attention_runs(plain_models(config, params), 3, kernel).values()
    by_xla, by_kernel = (run().astype(float) for run in runs)
    assert jnp.abs(by_xla - by_kernel).max() < race.APART[dtype]
