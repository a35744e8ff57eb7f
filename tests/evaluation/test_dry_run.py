"""What a run would take, from shapes alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from clover_jax import cli, train
from clover_jax.errors import UserError
from clover_jax.evaluation import dry_run as dry_run_module
from clover_jax.evaluation.dry_run import dry_run, step_shapes
from clover_jax.evaluation.targets import CHIPS, parse_target
from clover_jax.models.meshes import MeshShape
from clover_jax.training.settings import TrainSettings

EIGHT = TrainSettings(base="shape:llama3-8b", steps=100, batch_size=16, seq_len=2048)


@pytest.fixture(scope="module")
def on_v5e():
    return dry_run(EIGHT, "fsdp=16", parse_target("tpu-v5e:4x4"))


def test_an_8b_base_fits_sixteen_v5e_chips(on_v5e):
    assert on_v5e.mesh == MeshShape(fsdp=16)
    assert on_v5e.base_params == 8_030_261_248  # Llama 3 8B, as published
    parts = on_v5e.bytes_per_device
    assert parts["base"] == pytest.approx(8_030_261_248 * 2 / 16, rel=1e-3)
    assert parts["optimizer"] == pytest.approx(2 * parts["draft"], rel=1e-3)
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


FLAGS = ["--dry_run", "--base=shape:64x1x128", "--seq_len=16", "--mesh=fsdp=1"]
FLAGS += ["--drafter=medusa", "--target=tpu-v5e:4x4"]


def run(capsys, *flags):
    """Return the status, the lines of stdout and stderr."""
    status = cli.run(train.main, train.define_flags, [*FLAGS, *flags])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_the_command_says_what_to_install_where_there_is_no_compiler(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin\nlong story")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    status, lines, error = run(capsys)
    assert status == 0
    assert "memory is estimated only: " in error
    assert 'pip install "jax[tpu]==' in error
    assert json.loads(lines[-1])["compiled"] is None


def test_the_command_prints_what_the_compiler_says_and_refuses_what_does_not_fit(
    capsys, monkeypatch
):
    monkeypatch.setattr(dry_run_module, "find_devices", lambda target, count: jax.devices())
    status, lines, _ = run(capsys)
    assert status == 0
    assert any(line.startswith("compiled for tpu-v5e:4x4, 1 devices, in") for line in lines)
    row = json.loads(lines[-1])
    kept = sum(row["bytes_per_device"][kind] for kind in ("base", "draft", "optimizer"))
    compiled = row["compiled"]
    assert compiled["argument_bytes"] == pytest.approx(kept, rel=0.1)  # and the batch
    assert compiled["resident_bytes"] > compiled["argument_bytes"] + compiled["temporary_bytes"]
    assert compiled["floor_seconds"] >= row["flops_per_step"] / CHIPS["v5e"].matrix_rate

    # All that stays between steps fits, the step does not.
    small = dataclasses.replace(CHIPS["v5e"], memory=1.2 * kept)
    monkeypatch.setitem(CHIPS, "v5e", small)
    status, _, error = run(capsys)
    assert status == 2
    assert "the compiled step does not fit a device of tpu-v5e:4x4: it would need" in error


def test_what_does_not_even_fit_between_steps_is_refused_before_compiling(capsys, monkeypatch):
    monkeypatch.setattr(dry_run_module, "lower_training_step", lambda *_: pytest.fail("compiled"))
    status, _, error = run(capsys, "--base=shape:llama3-70b:2", "--mesh=data=8")
    assert status == 2
    assert "the largest part is optimizer" in error
