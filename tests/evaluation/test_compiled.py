"""Counting a program's work, targets, and what a decoding or training step would take."""

import dataclasses
import json
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from clover_jax import bench, train
from clover_jax.checkpoints.base import BaseModel
from clover_jax.decoding.models import load_shapes
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.errors import UserError
from clover_jax.evaluation import compiled
from clover_jax.evaluation import dry_run as dry_run_module
from clover_jax.evaluation.compiled import Work, count_work
from clover_jax.evaluation.dry_run import dry_run, step_shapes
from clover_jax.evaluation.targets import (
    CHIPS,
    NoCompiler,
    Target,
    find_devices,
    parse_target,
    prepare_environment,
)
from clover_jax.models.meshes import MeshShape
from clover_jax.training.settings import TrainSettings
from tests.conftest import run_command
from tests.decoding.test_greedy_equality import HYBRID
from tests.tiny_models import TINY, random_base, random_head, random_models

HERE = Target("here", "cpu", CHIPS["v6e"], "1")


def test_a_product_reads_its_weight_and_a_look_up_reads_nothing():
    def function(weights, x):
        return jnp.einsum("bd,vd->bv", x, weights["matrix"]) + weights["table"][3]

    weights = {"matrix": jnp.zeros((7, 5)), "table": jnp.zeros((4, 7))}
    assert count_work(function, weights, jnp.zeros((2, 5))) == Work(7 * 5 * 4, 140, 140)
    # One without weights counts among all products only; a part of a weight as large as it is.
    assert count_work(lambda w, x: x @ x, jnp.zeros(3), jnp.zeros((4, 4))) == Work(0, 0, 128)
    part = count_work(lambda w, x: x @ w[0].T, jnp.zeros((2, 3, 5)), jnp.zeros((1, 5)))
    assert part == Work(60, 30, 30)


def test_inner_functions_and_loops_count_as_often_as_they_run():
    def function(weights, x):
        def body(x, _):
            return jax.jit(lambda w, x: x @ w)(weights, x), None

        return jax.lax.scan(body, x, length=3)[0]

    assert count_work(function, jnp.zeros((5, 5)), jnp.zeros((1, 5))) == Work(300, 150, 150)


def test_loops_over_data_count_as_often_as_the_caller_says_and_branches_once():
    def function(weights, x, count):
        x = jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)
        return jax.lax.cond(count > 2, lambda x: x @ x, lambda x: x, x)

    given = jnp.zeros(()), jnp.zeros((4, 4)), jax.ShapeDtypeStruct((), jnp.int32)
    assert count_work(function, *given, loop_trips=3) == Work(0, 0, (3 + 1) * 2 * 4**3)


def test_products_that_no_result_needs_do_not_count():
    def function(weights, x, count):
        def body(_, x):
            product = jax.jit(lambda x: (x @ x, x @ weights))(x)  # the second is never read
            return product[0]

        return jax.lax.fori_loop(0, count, body, x)

    given = jnp.zeros((4, 4)), jnp.zeros((4, 4)), jax.ShapeDtypeStruct((), jnp.int32)
    assert count_work(function, *given) == Work(0, 0, 2 * 4**3)


def test_of_the_ways_for_platforms_that_of_the_platform_counts():
    def function(weights, x):
        ways = {"tpu": lambda x: x @ weights, "default": lambda x: x @ weights @ weights}
        return jax.lax.platform_dependent(x, **ways)

    given = jnp.zeros((5, 5)), jnp.zeros((1, 5))
    assert count_work(function, *given, platform="tpu") == Work(100, 50, 50)
    assert count_work(function, *given, platform="cuda") == Work(200, 100, 100)
    assert count_work(function, *given) == Work(200, 100, 100)  # on this CPU


def test_grouped_rows_read_a_matrix_each_at_most():
    def function(weights, rows):
        return jax.lax.ragged_dot(rows, weights, jnp.array([1, 0, len(rows) - 1]))

    matrix, size = 5 * 7, 4 * 5 * 7
    for rows, read in ((2, 2), (9, 3)):
        work = count_work(function, jnp.zeros((3, 5, 7)), jnp.zeros((rows, 5)))
        assert work == Work(read * size, 2 * rows * matrix, 2 * rows * matrix)


def test_the_command_prints_what_the_compiler_says(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda *_: jax.devices()[:1])
    flags = ["--target=tpu-v6e:2x2", "--base=shape:64x1x96", "--context=100", "--dtype=float32"]
    monkeypatch.setattr(compiled, "options_for", lambda platform: None)  # this compiler has others
    status, lines, _ = run_command(capsys, bench, *flags, "--draft=none")
    assert status == 0
    row = json.loads(lines[-1])
    # The weights of a plain step: qkv, out, MLP, lm_head; and live keys and values.
    weights = 4 * (64 * 192 + 64 * 64 + 3 * 64 * 192 + 96 * 64)
    assert row["floor_bytes"] == weights + 2 * 4 * 64 * 100
    assert row["floor_seconds"] == pytest.approx(row["floor_bytes"] / CHIPS["v6e"].bandwidth)
    assert row["argument_bytes"] > row["weight_bytes"] + row["cache_bytes"]
    new = row["output_bytes"] - row["aliased_bytes"]
    assert row["resident_bytes"] == row["argument_bytes"] + new + row["temporary_bytes"]
    assert row["fits"]
    assert row["flops"] > 2 * weights / 4
    assert row["bytes_accessed"] > weights
    assert "fits (arguments" in lines[1]


def test_states_that_are_kept_for_prompts_count_as_memory(capsys, monkeypatch):
    base = dataclasses.replace(TINY, num_layers=2, **HYBRID)
    hybrid = BaseModel(base, random_base(base), Path(), "random")
    models = random_models(*random_head(base, "clover_lr"), parse_tree("chain:3"))
    models = dataclasses.replace(models, base=hybrid)
    monkeypatch.setattr(compiled, "find_devices", lambda *_: jax.devices()[:1])
    monkeypatch.setattr(compiled, "load_shapes", lambda *_: models)
    spec = ModelSpec("shape:64x1x96", dtype="float32")
    row = compiled.compile_and_describe(HERE, spec, batch=3, context=10)
    delta = base.delta
    state = 4 * delta.num_key_heads * delta.num_groups * delta.value_size * delta.key_size
    inputs = 4 * delta.num_key_heads * (delta.conv_size - 1) * delta.channels
    assert row["kept_bytes"] == 2 * 3 * (state + inputs)
    new = row["output_bytes"] - row["aliased_bytes"] + row["kept_bytes"]
    assert row["resident_bytes"] == row["argument_bytes"] + new + row["temporary_bytes"]
    assert ", states of prompts 0.00)" in capsys.readouterr().out


def test_a_decode_step_is_not_split_over_fsdp():
    models = load_shapes(ModelSpec("shape:64x1x96", dtype="float32"))
    for mesh, target in (("fsdp=-1", "tpu-v6e:2x2"), ("fsdp=4", "gpu-h200")):
        with pytest.raises(UserError, match=f"--mesh={mesh}: fsdp=4 is for training; .* tensor"):
            compiled.lower_step(models, parse_target(target), mesh, batch=4, context=10)


def test_float32_is_compiled_as_it_is_decoded(monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda *_: jax.devices()[:1])
    models = load_shapes(ModelSpec("shape:64x1x96", dtype="float32"))
    with jax.default_matmul_precision("default"):
        text = compiled.lower_step(models, HERE, None, batch=1, context=10).lowered.as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


# Prints the report of one row on each mesh of these devices, its words first, then its figures.
ON_A_MESH = """
import sys, jax
from clover_jax.evaluation import compiled
from clover_jax.evaluation.targets import CHIPS, Target
from clover_jax.decoding.spec import ModelSpec
from clover_jax.runtime.jsonl import to_json

compiled.find_devices = lambda *_: jax.devices()
for mesh in sys.argv[1:]:
    spec = ModelSpec("shape:64x1x96", dtype="float32", mesh=mesh)
    target = Target("here", "cpu", CHIPS["v6e"], "4")
    print(to_json(compiled.compile_and_describe(target, spec, batch=1, context=10)))
"""


def test_every_device_of_a_mesh_has_a_whole_row(run_python):
    lines = run_python(ON_A_MESH, "data=4", "data=1", devices=4).splitlines()
    split, alone = (json.loads(line) for line in lines if line.startswith("{"))
    assert lines[0] == "--batch_size=1 is rounded up to 4 rows, as many on each device"
    assert (split["batch_size"], split["rows"], alone["rows"]) == (1, 4, 1)
    same = ("floor_seconds", "floor_bytes", "cache_bytes", "weight_bytes")
    assert [split[name] for name in same] == [alone[name] for name in same]


@pytest.mark.parametrize(
    "found",
    [
        "Ran out of memory in memory space hbm. Used 20.1G of 15.75G hbm. Exceeded",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (20.1G) exceeds "
        "available HBM (15.75G).",
    ],
)
def test_a_program_that_the_compiler_finds_too_large_is_one_line(found):
    def refuse(**_):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {found}")

    lowered = types.SimpleNamespace(compile=refuse)
    with pytest.raises(UserError, match=r"does not fit .*v5e:4x4: .* 20\.1G of 15\.75G, .*; do X"):
        compiled.compile_for(parse_target("tpu-v5e:4x4"), lowered, "do X")


def test_a_program_for_a_target_is_not_cached():
    seen = []
    use = lambda **_: seen.append(jax.config.jax_enable_compilation_cache)  # noqa: E731
    lowered, before = types.SimpleNamespace(compile=use), jax.config.jax_enable_compilation_cache
    compiled.compile_for(HERE, lowered, "")
    assert seen == [False]
    assert jax.config.jax_enable_compilation_cache == before


def test_names_stand_for_chips_and_arrangements():
    target = parse_target("tpu-v6e:2x2")
    assert (target.platform, target.topology, target.chip) == ("tpu", "v6e:2x2", CHIPS["v6e"])
    assert parse_target("gpu-h200").platform == "cuda"
    for name in ("tpu-v6e", "tpu-v9:2x2", "gpu-h100", "v6e:2x2", "tpu-v6e:2"):
        with pytest.raises(UserError, match=f"--target={re.escape(name)} is unknown; .*gpu-h200"):
            parse_target(name)


def test_what_the_user_set_in_the_environment_stays():
    environment = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--xla_dump_to=/x"}
    prepare_environment(parse_target("gpu-h200"), environment)
    assert environment["JAX_PLATFORMS"] == "tpu"
    assert environment["XLA_FLAGS"] == "--xla_dump_to=/x --xla_gpu_autotune_level=0"


INDIVISIBLE = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: 3x3 is not divisible by 2x2x1")


@pytest.mark.parametrize(
    ("target", "error", "message", "is_missing"),
    [
        ("tpu-v5e:4x4", RuntimeError("no\nlong"), r'\(no\); pip install "jax\[tpu\]==\d', True),
        ("gpu-h200", RuntimeError("no"), r'pip install "jax\[cuda13\]==', True),
        (
            "tpu-v6e:3x3",
            INDIVISIBLE,
            r"=tpu-v6e:3x3: .* arranged .*3x3 is not.*; give .* 4x4",
            False,
        ),
    ],
)
def test_a_missing_compiler_is_told_from_an_impossible_arrangement(
    target, error, message, is_missing, monkeypatch
):
    def fail(**_):
        raise error

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(UserError, match=message) as raised:
        find_devices(parse_target(target))
    # `train --dry_run` goes on without a compiler, not without an arrangement.
    assert isinstance(raised.value, NoCompiler) == is_missing


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
    with pytest.raises(UserError, match="would need .* and has 1.00 GB; the largest part is "):
        dataclasses.replace(on_v5e, device_memory=1e9).check_memory()
    # Two operations for each param of the teacher's layers and each token, at least.
    assert on_v5e.flops_per_step > 2 * 6.9e9 * 16 * 2048
    # The head's logits are computed once for D-PACE's weights and the loss (five positions), and
    # their gradient once; the teacher's once.
    decayed = dataclasses.replace(EIGHT, loss="dpace=0")
    by_decay = dry_run(decayed, "fsdp=16", parse_target("tpu-v5e:4x4"))
    assert on_v5e.flops_per_step == by_decay.flops_per_step
    assert on_v5e.tokens_per_step == 32_768


def test_the_command_prints_figures_and_ends_with_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--dry_run", "--base=shape:64x1x128", "--mesh=data=2,fsdp=4", "--seq_len=16"]
    status, lines, _ = run_command(capsys, train, *argv)
    assert status == 0
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
    settings = TrainSettings(base="shape:64x1x128", drafter="eagle3", batch_size=4, seq_len=16)
    whole, settings = settings, dataclasses.replace(settings, draft_vocab=32)
    assert dry_run(settings, None).base_params == dry_run(whole, None).base_params


def test_rows_that_devices_cannot_share_are_refused():
    settings = TrainSettings(base="shape:64x1x128", batch_size=6, seq_len=16)
    with pytest.raises(UserError, match="--batch_size=6 must be divisible by data x fsdp = 4"):
        dry_run(settings, "data=4")


FLAGS = ["--dry_run", "--base=shape:64x1x128", "--seq_len=16", "--mesh=fsdp=1"]
FLAGS += ["--drafter=medusa", "--target=tpu-v5e:4x4"]


def test_the_command_says_what_to_install_where_there_is_no_compiler(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin\nlong story")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    status, lines, error = run_command(capsys, train, *FLAGS)
    assert status == 0
    assert "memory is estimated only: " in error
    assert 'pip install "jax[tpu]==' in error
    assert json.loads(lines[-1])["compiled"] is None


def test_the_command_says_what_the_compiler_does_and_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(dry_run_module, "find_devices", lambda target, count: jax.devices())
    status, lines, _ = run_command(capsys, train, *FLAGS)
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
    status, _, error = run_command(capsys, train, *FLAGS)
    assert status == 2
    assert "the compiled step does not fit a device of tpu-v5e:4x4: it would need" in error


def test_what_does_not_even_fit_between_steps_is_refused_before_compiling(capsys, monkeypatch):
    monkeypatch.setattr(dry_run_module, "lower_training_step", lambda *_: pytest.fail("compiled"))
    flags = *FLAGS, "--base=shape:llama3-70b:2", "--mesh=data=8"
    status, _, error = run_command(capsys, train, *flags)
    assert status == 2
    assert re.search("would need .* GB and has 17.18 GB; the largest part is optimizer", error)
