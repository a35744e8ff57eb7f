"""What compilers make of decoding and training steps; some need those of absent hardware."""

import dataclasses
import importlib.util
import json
import os
import sys

import jax
import jax.numpy as jnp
import pytest

from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation import compiled, dry_run
from clover_jax.evaluation.dry_run import step_shapes
from clover_jax.evaluation.targets import CHIPS, Target, find_devices, parse_target
from clover_jax.models.meshes import MeshShape, make_mesh
from clover_jax.training.settings import TrainSettings
from experiments.aot import decoding
from experiments.aot.__main__ import main
from experiments.aot.hlo import Program
from experiments.aot.training import compile_training_step
from tests.conftest import run_program


def test_the_report_and_the_program_are_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiled, "find_devices", lambda *_: jax.devices()[:1])
    target = Target("here", "cpu", CHIPS["v6e"], "1")  # this machine's compiler
    spec, program = ModelSpec("shape:64x1x96", dtype="float32"), str(tmp_path / "step.hlo")
    row = decoding.compile_and_describe(target, spec, batch=1, context=10, program=program)
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule")
    assert f"{row['moved_over_floor']:.2f} x the floor of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["melt"], "'melt' is not a command; use decode or train"),
        (["decode"], "--target is required, such as tpu-v6e:2x2"),
        (["train", "--target=tpu-v9:2x2"], "--target=tpu-v9:2x2 is unknown"),
        (["decode", "--target=tpu-v6e:2x2", "--program=/missing/step"], "must be a file in a fol"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, said, capsys):
    assert main(argv) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


COMPILERS = {"tpu-v6e:2x2": "libtpu", "gpu-h200": "jax_plugins.xla_cuda13"}


def figures(command, target, *flags):
    """Return the figures of a step for a target; skip where its compiler is not installed."""
    module = COMPILERS["gpu-h200" if target.startswith("gpu") else "tpu-v6e:2x2"]
    if not importlib.util.find_spec(module.split(".")[0]):
        pytest.skip(f"{module} is not installed")
    # The precision that the other tests ask for widens a GPU's bfloat16 products.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_DEFAULT_MATMUL_PRECISION"}
    flags = command, f"--target={target}", *flags
    finished = run_program(sys.executable, "-m", "experiments.aot", *flags, env=environment)
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.aot
def test_a_mesh_axis_may_be_a_part_of_a_side_of_the_chips():
    pytest.importorskip("libtpu")
    mesh = make_mesh(MeshShape(data=2, tensor=8), find_devices(parse_target("tpu-v6e:4x4")))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 8}
    assert len({device.id for device in mesh.devices.flat}) == 16


@pytest.mark.aot
def test_rows_are_written_to_a_cache_by_the_devices_that_have_it():
    flags = ["--base=shape:llama3-70b:1", "--mesh=data=2,tensor=8", "--batch_size=16"]
    flags += ["--draft=lookup", "--tree=chain:5", "--context=2000"]
    found = figures("decode", "tpu-v6e:4x4", *flags)
    assert [sent for sent in found["collectives"] if "commit" in sent] == []
    assert found["cache_copies"] == []


@pytest.mark.aot
@pytest.mark.parametrize(
    ("batch", "draft"), [(1, "random:clover2"), (16, "random:clover2"), (1, "none")]
)
@pytest.mark.parametrize(
    ("target", "attention"), [*((name, "xla") for name in COMPILERS), ("gpu-h200", "cudnn")]
)
def test_a_compiled_step_copies_no_cache_and_no_weight(target, attention, batch, draft):
    flags = ["--base=shape:llama3-8b:1", "--context=2000"]
    flags += [f"--batch_size={batch}", f"--draft={draft}", f"--attention={attention}"]
    found = figures("decode", target, *flags)
    assert found["cache_copies"] == []
    assert found["weight_copies"] == []
    assert found["moved_over_floor"] < 2
    # At batch 16 one layer at work holds more than a hundredth of so few layers' weights on a GPU.
    most = 0.01 if batch == 1 or target.startswith("tpu") else 0.03
    assert 0 < found["temporary_value_bytes"] < most * found["weight_bytes"]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("base", "draft", "batch", "context", "most"),
    [
        # Experts laid out again: 1.79 with two layers.
        ("mixtral-8x7b:1", "random:clover2", 1, 2040, 1.1),
        # A whole cache read for a window of 128: 1.89.
        ("gpt-oss-20b:2", "random:clover2", 16, 8184, 1.4),
        # XLA for GPU failed with one row of EAGLE's own layer.
        ("llama3-8b:1", "random:eagle", 1, 2040, 1.1),
    ],
)
def test_a_gpu_moves_what_it_must(base, draft, batch, context, most):
    flags = [f"--base=shape:{base}", f"--draft={draft}", "--attention=cudnn"]
    flags += [f"--batch_size={batch}", f"--context={context}"]
    found = figures("decode", "gpu-h200", *flags)
    assert found["moved_over_floor"] < most
    assert found["cache_copies"] == []


TRAINING = "--batch_size=4", "--seq_len=256"


@pytest.mark.aot
@pytest.mark.parametrize("target", COMPILERS)
def test_the_training_step_compiles_for_absent_hardware(target):
    found = figures("train", target, *TRAINING, "--base=shape:512x2x8192", "--mesh=fsdp=4")
    assert found["resident"] < found["device_memory"]
    assert found["sent"]


@pytest.mark.aot
def test_no_more_than_two_layers_experts_are_gathered_at_a_time():
    flags = ["--mesh=fsdp=16", "--drafter=clover_lr", "--num_positions=1", "--batch_size=16"]
    flags += ["--seq_len=256", "--base=shape:qwen3-30b-a3b"]
    two, six = (figures("train", "tpu-v5e:4x4", *flags[:-1], f"{flags[-1]}:{n}") for n in (2, 6))
    # A layer's experts are 1.2 GB.
    assert six["temporaries"] - two["temporaries"] < 0.5e9


SIZES = {"batch_size": 2, "seq_len": 128, "num_positions": 2, "num_augmenting_layers": 1}
SMALL = TrainSettings(base="shape:64x1x8192", **SIZES, loss_chunk=32)
ALL_LOGITS = SMALL.batch_size * SMALL.seq_len * 8192  # B x S x V


def compile_small(**changes):
    """Let this machine's compiler stand for the target's; return the figures and the text."""
    step = step_shapes(dataclasses.replace(SMALL, **changes), jnp.dtype("float32"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dry_run, "find_devices", lambda target, count: jax.devices())
        return compile_training_step(step, MeshShape(), parse_target("tpu-v5e:4x4"))


@pytest.fixture(scope="module")
def small():
    return compile_small()


def test_no_array_has_the_logits_of_all_positions(small):
    compiled, text = small
    assert largest_over_vocabulary(text) == 32 * 8192
    assert compiled.temporaries < 4 * SMALL.num_positions * ALL_LOGITS


def test_without_chunks_the_logits_of_all_positions_would_be_found():
    compiled, text = compile_small(loss_chunk=SMALL.batch_size * SMALL.seq_len)
    assert largest_over_vocabulary(text) >= ALL_LOGITS
    assert compiled.temporaries > 4 * SMALL.num_positions * ALL_LOGITS


def largest_over_vocabulary(text):
    """Return the entries of the largest array of logits in a program, the base's matrices aside."""
    program = Program(text)
    sizes = [
        array.num_bytes // 4
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        for array in instruction.results
        if 8192 in array.dims and array.sizes != (64, 8192)
    ]
    return max(sizes)


def test_figures_add_up_to_what_a_device_holds(small):
    compiled, _ = small
    kept = sum(compiled.arguments.values()) + compiled.temporaries
    assert compiled.resident == pytest.approx(kept, rel=0.01)
    assert set(compiled.arguments) == {"base", "draft", "optimizer", "batch"}
    assert compiled.sent == []
    assert compiled.largest_gather == 0


# Prints the report of a step on eight devices, for settings given as JSON.
SHARDED = """
import json, sys
import jax
from clover_jax import cli
from clover_jax.evaluation import dry_run
from clover_jax.evaluation.targets import parse_target
from clover_jax.training.settings import TrainSettings
from experiments.aot.training import compile_and_describe

dry_run.find_devices = lambda target, count: jax.devices()
settings = TrainSettings.from_dict(json.loads(sys.argv[1]))
cli.report(compile_and_describe(settings, "fsdp=4,tensor=2", parse_target("gpu-h200")))
"""


def test_a_sharded_base_is_gathered_in_pieces(run_python):
    settings = dataclasses.replace(SMALL, batch_size=8, num_positions=1, dtype="float32")
    *lines, report = run_python(SHARDED, json.dumps(settings.to_dict()), devices=8).splitlines()
    row = json.loads(report)
    # Its matrices over the vocabulary are the largest; fsdp gathers what tensor leaves of them.
    assert row["largest_gather"] == 4 * 64 * 8192 // 2
    assert row["largest_gather"] < row["whole_base"] / 2
    kinds = {sent["kind"] for sent in row["sent"]}
    assert kinds >= {"all-gather", "all-reduce"}
    assert row["arguments"]["base"] == pytest.approx(row["whole_base"] / 4, rel=0.01)
    assert any(line.startswith("collectives of a step: ") for line in lines)
