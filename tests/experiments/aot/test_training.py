"""The compiled training step: its figures, and arrays that may not exist in it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from clover_jax.evaluation import dry_run
from clover_jax.evaluation.dry_run import step_shapes
from clover_jax.evaluation.targets import parse_target
from clover_jax.models.meshes import MeshShape
from clover_jax.training.settings import TrainSettings
from experiments.aot.hlo import Program
from experiments.aot.training import compile_training_step

SMALL = TrainSettings(
    base="shape:64x1x8192",
    batch_size=2,
    seq_len=128,
    num_positions=2,
    num_augmenting_layers=1,
    loss_chunk=32,
)
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
    settings = dataclasses.replace(
        SMALL, batch_size=8, num_positions=1, num_augmenting_layers=1, dtype="float32"
    )
    *lines, report = run_python(SHARDED, json.dumps(settings.to_dict()), devices=8).splitlines()
    row = json.loads(report)
    # Its matrices over the vocabulary are the largest; fsdp gathers what tensor leaves of them.
    assert row["largest_gather"] == 4 * 64 * 8192 // 2
    assert row["largest_gather"] < row["whole_base"] / 2
    kinds = {sent["kind"] for sent in row["sent"]}
    assert kinds >= {"all-gather", "all-reduce"}
    assert row["arguments"]["base"] == pytest.approx(row["whole_base"] / 4, rel=0.01)
    assert any(line.startswith("collectives of a step: ") for line in lines)
