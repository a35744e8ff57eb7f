"""The training step compiled for a target: figures, refusals, and what may not exist in it."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from clover_jax import cli, train
from clover_jax.benchmark import compiled_training, dry_run
from clover_jax.benchmark.compiled_training import compile_training_step
from clover_jax.benchmark.step_shapes import step_shapes
from clover_jax.errors import UserError
from clover_jax.sharding.meshes import MeshShape
from clover_jax.training.settings import TrainSettings
from clover_jax.xla.hlo import Program
from clover_jax.xla.targets import parse_target
from tests.conftest import REPOSITORY

TARGET = parse_target("tpu-v5e:4x4")
SMALL = TrainSettings(
    base="shape:64x1x8192",
    batch_size=2,
    seq_len=128,
    num_positions=2,
    num_augmenting_layers=1,
    loss_chunk=32,
)
ALL_LOGITS = SMALL.batch_size * SMALL.seq_len * 8192  # B x S x V


def compile_small(target=TARGET, **changes):
    """Let this machine's compiler stand for the target's; return the figures and the text."""
    step = step_shapes(dataclasses.replace(SMALL, **changes), jnp.dtype("float32"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiled_training, "find_devices", lambda target, count: jax.devices())
        return compile_training_step(step, MeshShape(), target)


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
    assert set(compiled.arguments) == {"base", "draft", "optimiser", "batch"}
    assert compiled.sent == []
    assert compiled.largest_gather == 0


def test_a_step_in_parts_needs_less_memory():
    changes = {"drafter": "medusa", "num_augmenting_layers": None, "base": "shape:64x1x128"}
    changes |= {"batch_size": 8, "loss_chunk": 8, "num_positions": 1}
    (whole, _), (parts, _) = (
        compile_small(**changes, gradient_accumulation_steps=n) for n in (1, 4)
    )
    assert parts.temporaries < 0.5 * whole.temporaries


# Prints the figures of a step on eight devices, for settings given as JSON.
SHARDED = """
import json, sys
import jax, jax.numpy as jnp
from clover_jax.xla.targets import parse_target
from clover_jax.sharding.meshes import MeshShape
from clover_jax.benchmark import compiled_training
from clover_jax.training.settings import TrainSettings
from clover_jax.benchmark.step_shapes import step_shapes

compiled_training.find_devices = lambda target, count: jax.devices()
step = step_shapes(TrainSettings.from_dict(json.loads(sys.argv[1])), jnp.dtype("float32"))
compiled, _ = compiled_training.compile_training_step(
    step, MeshShape(fsdp=4, tensor=2), parse_target("tpu-v5e:4x4")
)
print(json.dumps(compiled.to_row()))
"""


def test_a_sharded_base_is_gathered_in_pieces(run_python):
    settings = dataclasses.replace(SMALL, batch_size=8, num_positions=1, num_augmenting_layers=1)
    row = json.loads(run_python(SHARDED, json.dumps(settings.to_dict()), devices=8))
    # Its matrices over the vocabulary are the largest; fsdp gathers what tensor leaves of them.
    assert row["largest_gather"] == 4 * 64 * 8192 // 2
    assert row["largest_gather"] < row["whole_base"] / 2
    kinds = {sent["kind"] for sent in row["sent"]}
    assert kinds >= {"all-gather", "all-reduce"}
    assert row["arguments"]["base"] == pytest.approx(row["whole_base"] / 4, rel=0.01)


@pytest.mark.parametrize(
    "found",
    [
        "Ran out of memory in memory space hbm. Used 20.1G of 15.75G hbm. Exceeded",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (20.1G) exceeds "
        "available HBM (15.75G).",
    ],
)
def test_what_the_compiler_says_is_too_large_is_one_line(monkeypatch, found):
    class Refusing:
        def trace(self, *arguments):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {found}")

    monkeypatch.setattr(compiled_training, "make_train_step", lambda config: Refusing())
    with pytest.raises(UserError, match=r"does not fit .*v5e:4x4: .* 20\.1G of 15\.75G, by the"):
        compile_small()


def test_a_device_that_is_too_small_is_refused_by_the_compilers_figures(small):
    compiled = dataclasses.replace(small[0], device_memory=1e6)
    with pytest.raises(UserError, match=r"would need 0\.\d\d GB of 0\.00 GB; give more devices"):
        compiled.check_memory()


FLAGS = ["--dry_run", "--base=shape:64x1x128", "--seq_len=16", "--mesh=fsdp=1"]


def test_the_command_says_what_to_install_where_there_is_no_compiler(capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin\nlong story")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    status = cli.run(train.main, train.define_flags, [*FLAGS, "--target=tpu-v5e:4x4"])
    captured = capsys.readouterr()
    assert status == 0
    assert "figures are computed only: " in captured.err
    assert 'pip install "jax[tpu]==' in captured.err
    assert json.loads(captured.out.splitlines()[-1])["compiled"] is None


def test_the_command_prints_what_the_compiler_says(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_training, "find_devices", lambda target, count: jax.devices())
    program = tmp_path / "step.txt"
    flags = [*FLAGS, "--target=tpu-v5e:4x4", f"--program={program}", "--drafter=medusa"]
    assert cli.run(train.main, train.define_flags, flags) == 0
    out = capsys.readouterr().out
    assert "compiled for tpu-v5e:4x4, 1 devices, in" in out
    row = json.loads(out.splitlines()[-1])
    assert row["compiled"]["target"] == "tpu-v5e:4x4"
    assert program.read_text().startswith("HloModule")


def test_what_cannot_even_lie_there_is_refused_before_compiling(capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "compile_training_step", lambda *_: pytest.fail("compiled"))
    flags = ["--dry_run", "--base=shape:llama3-70b:2", "--mesh=data=8", "--target=tpu-v5e:4x4"]
    assert cli.run(train.main, train.define_flags, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the largest part is optimiser" in line


COMPILERS = {"tpu-v6e:2x2": "libtpu", "gpu-h200": "jax_plugins.xla_cuda13"}


@pytest.mark.aot
@pytest.mark.parametrize("target", COMPILERS)
def test_the_step_compiles_for_absent_hardware(target):
    if not importlib.util.find_spec(COMPILERS[target].partition(".")[0]):
        pytest.skip(f"{COMPILERS[target]} is not installed")
    found = compiled_for(f"--target={target}", "--base=shape:512x2x8192", "--mesh=fsdp=4")
    assert found["resident"] < found["device_memory"]
    assert found["sent"]


@pytest.mark.aot
def test_no_more_than_two_layers_experts_are_gathered_at_a_time():
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is not installed")
    flags = ["--target=tpu-v5e:4x4", "--mesh=fsdp=16", "--drafter=clover_lr", "--num_positions=1"]
    two, six = (
        compiled_for(*flags, "--batch_size=16", f"--base=shape:qwen3-30b-a3b:{layers}")
        for layers in (2, 6)
    )
    # A layer's experts are 1.2 GB.
    assert six["temporaries"] - two["temporaries"] < 0.5e9


def compiled_for(*flags):
    """Return what the command says of the step that a target's compiler made."""
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "clover_jax.train",
            "--dry_run",
            "--batch_size=4",
            "--seq_len=256",
            *flags,
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])["compiled"]
