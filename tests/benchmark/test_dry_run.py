"""What a run would take, from shapes alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from clover_jax import cli, train
from clover_jax.benchmark.dry_run import dry_run
from clover_jax.benchmark.step_shapes import step_shapes
from clover_jax.errors import UserError
from clover_jax.sharding.meshes import MeshShape
from clover_jax.training.settings import TrainSettings
from clover_jax.xla.targets import parse_target
from clover_jax.xla.work import count_flops

EIGHT = TrainSettings(base="shape:llama3-8b", steps=100, batch_size=16, seq_len=2048)


def test_products_are_counted_through_loops_and_branches():
    def function(x, count):
        x = jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]
        x = jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)
        return jax.lax.cond(count > 2, lambda x: x @ x, lambda x: x, x)

    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert count_flops(function, *shapes, loop_trips=3) == (5 + 3 + 1) * 2 * 4**3


def test_batched_products_are_counted_once_an_element():
    left, right = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 3, 4), (2, 4, 5)))
    assert count_flops(jnp.matmul, left, right) == 2 * 2 * 3 * 4 * 5


@pytest.fixture(scope="module")
def on_v5e():
    return dry_run(EIGHT, "fsdp=16", parse_target("tpu-v5e:4x4"))


def test_an_8b_base_fits_sixteen_v5e_chips(on_v5e):
    assert on_v5e.mesh == MeshShape(fsdp=16)
    assert on_v5e.base_params == 8_030_261_248  # Llama 3 8B, as published
    parts = on_v5e.bytes_per_device
    assert parts["base"] == pytest.approx(8_030_261_248 * 2 / 16, rel=1e-3)
    assert parts["optimiser"] == pytest.approx(2 * parts["draft"], rel=1e-3)
    assert parts["draft"] == pytest.approx(on_v5e.draft_params * 4 / 16, rel=1e-2)
    assert on_v5e.total_bytes < on_v5e.device_memory == 16 * 2**30
    on_v5e.check_memory()
    # Two operations for each param of the teacher's layers and each token, at least.
    assert on_v5e.flops_per_step > 2 * 6.9e9 * 16 * 2048
    assert on_v5e.tokens_per_step == 32_768


def test_what_cannot_fit_is_refused_with_its_largest_part():
    alone = dry_run(EIGHT, "data=16", parse_target("tpu-v5e:4x4"))
    with pytest.raises(
        UserError, match="would need .* GB and has 17.18 GB; the largest part is ba"
    ):
        alone.check_memory()


def test_the_command_prints_figures_and_ends_with_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--dry_run", "--base=shape:64x1x128", "--mesh=data=2,fsdp=4", "--seq_len=16"]
    assert cli.run(train.main, train.define_flags, argv) == 0
    lines = capsys.readouterr().out.splitlines()
    row = json.loads(lines[-1])
    assert row["mesh"] == "data=2,fsdp=4,tensor=1"  # of devices that are not here
    assert row["dry_run"]
    assert row["seconds"] is None
    assert lines[0] == "mesh data=2,fsdp=4,tensor=1: 8 devices"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mesh", "dtype", "per_param"),
    [("data=2", "float32", 0), ("data=2", "bfloat16", 2), ("fsdp=2", "float32", 4)],
)
def test_only_what_fsdp_gathers_or_a_dtype_casts_is_copied(mesh, dtype, per_param):
    settings = TrainSettings(base="shape:64x1x128", batch_size=2, seq_len=16, dtype=dtype)
    dry = dry_run(settings, mesh)
    base = step_shapes(settings, jnp.dtype(dtype)).base if "fsdp" in mesh else {}
    vocabulary = sum(base[name].size for name in ("embedding", "lm_head") if name in base)
    layer = sum(leaf.size for leaf in jax.tree.leaves(base.get("layers_0")))
    gathered = dry.draft_params + vocabulary + 2 * layer
    assert dry.bytes_per_device["gathered"] == per_param * gathered


def test_a_cpu_s_user_is_told_that_its_programs_keep_more():
    dry = dry_run(TrainSettings(base="shape:64x1x128", batch_size=2, seq_len=16), None)
    (memory,) = (line for line in dry.lines() if line.startswith("memory a device"))
    assert "activations are estimated as for an accelerator" in memory
    elsewhere = dataclasses.replace(dry, device_memory=16e9).lines()
    assert not [line for line in elsewhere if "accelerator" in line]


def test_a_reduced_vocabulary_adds_no_params_to_the_base():
    settings = TrainSettings(
        base="shape:64x1x128", drafter="eagle3", draft_vocab=32, batch_size=4, seq_len=16
    )
    whole = dataclasses.replace(settings, draft_vocab=None)
    assert dry_run(settings, None).base_params == dry_run(whole, None).base_params


def test_rows_that_devices_cannot_share_are_refused():
    settings = TrainSettings(base="shape:64x1x128", batch_size=6, seq_len=16)
    with pytest.raises(UserError, match="--batch_size=6 must be divisible by data x fsdp = 4"):
        dry_run(settings, "data=4")
