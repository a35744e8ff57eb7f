"""`bench --target`: a compiler's account of a step; here this machine's compiler is asked."""

import json
import types

import jax
import pytest

from clover_jax import bench, cli
from clover_jax.decoding.models import load_shapes
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.evaluation import compiled
from clover_jax.evaluation.targets import CHIPS, Target, parse_target

HERE = Target("here", "cpu", CHIPS["v6e"], "1")


def test_the_command_prints_what_the_compiler_says(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda target: jax.devices()[:1])
    flags = ["--target=tpu-v6e:2x2", "--base=shape:64x1x96", "--context=100", "--dtype=float32"]
    monkeypatch.setattr(compiled, "options_for", lambda platform: None)  # this compiler has others
    assert cli.run(bench.main, bench.define_flags, [*flags, "--draft=none"]) == 0
    lines = capsys.readouterr().out.splitlines()
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


def test_a_decode_step_is_not_split_over_fsdp(monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda target: jax.devices() * 4)
    models = load_shapes(ModelSpec("shape:64x1x96", dtype="float32"))
    with pytest.raises(UserError, match=r"--mesh=fsdp=-1: fsdp=4 is for training; .* tensor"):
        compiled.lower_step(models, HERE, "fsdp=-1", batch=4, context=10)


def test_float32_is_compiled_as_it_is_decoded(monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda target: jax.devices()[:1])
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

compiled.find_devices = lambda target: jax.devices()
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
    lowered = types.SimpleNamespace(
        compile=lambda **_: seen.append(jax.config.jax_enable_compilation_cache)
    )
    before = jax.config.jax_enable_compilation_cache
    compiled.compile_for(HERE, lowered, "")
    assert seen == [False]
    assert jax.config.jax_enable_compilation_cache == before
