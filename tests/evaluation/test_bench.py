"""The bench command at tiny size, and the parts of a step that it times."""

import dataclasses
import functools
import json
import re
from collections import Counter
from pathlib import Path

import jax
import pytest

from clover_jax import bench
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.decoding import models, programs
from clover_jax.decoding.models import Models, fitting_context, load, load_shapes, running_state
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import draft
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.errors import UserError
from clover_jax.evaluation import measured, parts
from clover_jax.evaluation.measured import Ceilings, engine_run, room_for
from clover_jax.evaluation.parts import STEPS, draft_loop, steps_at_once
from clover_jax.evaluation.plan import Method
from clover_jax.models.meshes import MeshShape, make_mesh
from clover_jax.runtime.turns import WARM_UP
from experiments.aot.hlo import Program
from tests.conftest import run_command
from tests.tiny_models import TINY, random_base, random_head

BASE = ("--base=shape:64x1x96", "--context=100", "--rounds=3")

# Bytes of qkv, out, MLP and lm_head of that base in float32.
WEIGHTS = 4 * (64 * 192 + 64 * 64 + 3 * 64 * 192 + 96 * 64)
SECONDS = {"plain": 0.002, "step": 0.005, "draft": 0.0009}


def spec(kind, tree=None):
    return ModelSpec("shape:64x1x96", draft=f"random:{kind}", tree=tree, dtype="float32")


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command: (status, lines of stdout, stderr). The machine's limits are not measured."""
    limits = Ceilings(bandwidth=1e9, matrix_rate=1e10)
    monkeypatch.setattr("clover_jax.evaluation.measured.measure_ceilings", lambda dtype: limits)

    return functools.partial(run_command, capsys, bench)


def test_every_part_is_timed_next_to_its_floor(command, monkeypatch):
    buffer_lengths = set()

    def spied(*arguments, **named):
        buffer_lengths.add(arguments[4])
        return empty_state(*arguments, **named)

    for module in (programs, models):
        monkeypatch.setattr(module, "empty_state", spied)
    head = "--draft=random:clover2:num_augmenting_layers=1"  # one layer compiles sooner than two
    status, lines, _ = command(*BASE, head, "--tree=chain:2", "--force_accept=1", "--batch_size=2")
    assert status == 0
    report = json.loads(lines[-1])
    shown = {"plain step", "step", "absorb", "draft", "draft level 1", "draft level 2", "verify"}
    assert shown | {"accept", "commit"} <= set(report["parts"])
    assert all(part["ms"] > 0 for name, part in report["parts"].items() if "level" not in name)
    # The weights that a plain step reads, at 1 GB/s; and live keys.
    floor = 1e3 * (WEIGHTS + 2 * 2 * 4 * 64 * 100) / 1e9
    assert report["parts"]["plain step"]["floor_ms"] == pytest.approx(floor, abs=1e-4)
    assert buffer_lengths == {256}  # or the engine and the chunk would not be the same
    assert report["force_accept"] == 1
    assert report["versions"]["jax"]
    assert any("forced to accept 1" in line for line in lines)


def test_a_round_needs_room_for_what_its_steps_may_emit():
    models = load_shapes(ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:1"))
    # Three rounds, as many to warm up and one to spare, of 8 steps of 2 tokens each.
    assert room_for(models, 3, force_accept=None) == 7 * 8 * 2


def test_the_context_is_no_longer_than_the_docstring_says():
    tiny = load_shapes(ModelSpec("builtin:tiny", draft="random:clover2", dtype="float32"))
    assert fitting_context(tiny, room=912) == 112
    long = load_shapes(ModelSpec("shape:llama3-8b", dtype="float32"))
    assert fitting_context(long, room=912) == 1024


@pytest.fixture
def precisions(command, monkeypatch):
    """The precisions of products at which this machine's limits are measured."""
    found = []

    def limits(dtype):
        found.append(jax.config.jax_default_matmul_precision)
        return Ceilings(1e9, 1e10)

    monkeypatch.setattr("clover_jax.evaluation.measured.measure_ceilings", limits)
    with jax.default_matmul_precision("default"):
        yield found


def test_a_base_alone_is_timed_too_and_float32_as_it_is_decoded(command, precisions, monkeypatch):
    def short(spec):
        loaded = load(spec)
        config = dataclasses.replace(loaded.base.config, max_position_embeddings=400)
        return dataclasses.replace(loaded, base=dataclasses.replace(loaded.base, config=config))

    monkeypatch.setattr("clover_jax.evaluation.measured.load", short)
    arguments = (BASE[0], "--rounds=3", "--draft=none", "--dtype=float32")
    status, lines, error = command(*arguments)
    assert (status, error) == (0, "")
    report = json.loads(lines[-1])
    assert report["break_even_accepted"] == 0
    assert precisions == ["highest"]
    # The base is short, so the context is what the rounds leave of it.
    assert report["context"] == 400 - 7 * 8


def test_a_sweep_times_float32_as_it_is_decoded(command, precisions, monkeypatch):
    def seconds(runs, rounds):
        precisions.append(jax.config.jax_default_matmul_precision)
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(measured, "time_in_turns", seconds)
    status, lines, _ = command(*BASE, "--sweep", "--batch_sizes=1", "--nodes=1", "--dtype=float32")
    assert status == 0
    assert len(json.loads(lines[-1])["cells"]) == 1
    assert precisions == ["highest"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--mesh=data=2",), "--mesh=data=2: bench times one device"),
        (("--target=tpu-v9:2x2",), "--target=tpu-v9:2x2 is unknown"),
        (("--draft=random:oracle",), "drafter 'oracle' is unknown"),
        (("--context=4000",), "4000 and the 912 positions .* more than 2048.*; give a smaller --c"),
        (("--sweep", "--draft=random:clover", "--tree=paper25"), "this clover head drafts at .* 3"),
        (("--sweep", "--force_accept=1"), "--force_accept is not for --sweep"),
        (("--nodes=4",), "--nodes is for --sweep"),
        (("--target=gpu-h200", "--rounds=5"), "--rounds is to measure, not for --target"),
        (("--draft=none", "--tree=chain:2"), "--tree=chain:2 needs a draft"),
        (("--draft=none", "--int8=base,draft"), "--int8=draft needs a draft.* give --int8=base"),
        (("--draft=random:clover", "--force_accept=4"), "of the tree clover4 has more than 3 nod"),
        (("--tree=chain:2+copy:8", "--force_accept=3"), "a head drafts in .* has more than 2 node"),
        (("--tree=auto",), "--tree=auto is for generate and evaluate; bench takes a tree"),
        (("--target=gpu-h200", "--draft=/x"), "only shapes are needed; give random:KIND"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, said, command):
    status, lines, error = command(*BASE[:1], *argv)
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert re.search(said, error)


@pytest.fixture
def measure(monkeypatch):
    """Measure on a machine where every part takes a second."""

    def run(models, limits):
        second = lambda runs, *_, **__: dict.fromkeys(runs, 1.0)  # noqa: E731
        monkeypatch.setattr(measured, "time_in_turns", second)
        monkeypatch.setattr(measured, "measure_ceilings", lambda dtype: limits)
        return measured.measure(models, batch=1, context=100, rounds=3, force_accept=0)

    return run


def test_the_share_of_the_bandwidth_is_the_bytes_where_products_take_longer(measure):
    models = load(ModelSpec("shape:64x1x96", dtype="float32"))
    found = measure(models, Ceilings(bandwidth=1e6, matrix_rate=1e3))
    assert found["parts"]["plain step"]["floor_ms"] == pytest.approx(2 * WEIGHTS / 4)
    share = (WEIGHTS + 2 * 4 * 64 * 100) / 1e6
    assert found["plain_step_share_of_bandwidth"] == pytest.approx(share, abs=1e-3)


def test_a_level_is_timed_only_where_the_head_drafts_it(measure):
    models = load(spec("clover", "clover4"))
    found = measure(models, Ceilings(bandwidth=1e6, matrix_rate=1e3))
    levels = [name for name in found["parts"] if name.startswith("draft level")]
    assert levels == ["draft level 1", "draft level 2", "draft level 3"]
    assert found["sum_of_parts_ms"] == 5e3  # absorb, draft, verify, accept, commit


@pytest.mark.parametrize("int8", [(), ("draft",), ("base", "draft")])
def test_parameters_are_counted_alike_whatever_is_quantized(int8):
    rounded = dataclasses.replace(spec("clover"), int8=int8)
    about = measured.describe_run(load(rounded), rounded)
    assert about["base_parameters"] == WEIGHTS // 4 + 96 * 64 + 3 * 64  # embedding and norms
    plain = load(spec("clover"))
    assert about["draft_parameters"] == sum(x.size for x in jax.tree.leaves(plain.draft_params))


@pytest.mark.parametrize("pace", [2, None])
def test_the_round_in_the_middle_begins_at_the_context(pace):
    context, rounds, batch = 200, 3, 2
    forced = SamplingConfig(force_accept=1)
    models = load(spec("clover2", "chain:2"))
    run = engine_run(models, forced, batch, context, context + 160, rounds, pace)
    for _ in range(WARM_UP + rounds // 2):
        rows = run()
    # The token that was emitted last is not committed yet.
    assert [len(row.prompt_ids + row.output_ids) - 1 for row in rows] == [context] * batch


@pytest.fixture(scope="module")
def swept():
    return load(spec("clover2", "chain:3"))


def test_a_cell_adds_up_what_a_step_costs(swept, monkeypatch):
    asked = []

    def seconds(runs, rounds):
        asked.append([name for name in runs if name.startswith("verify")])
        verify = {name: 0.001 * int(name.split()[1]) for name in asked[-1]}
        return {name: steps_at_once() * each for name, each in (SECONDS | verify).items()}

    monkeypatch.setattr(measured, "time_in_turns", seconds)
    cells = measured.sweep(swept, [1, 2], [5, 1], context=10, rounds=3)
    sizes = [(cell["batch_size"], cell["nodes"]) for cell in cells]
    assert sizes == [(1, 5), (1, 1), (2, 5), (2, 1)]
    # A root and the nodes; of the tree of 3 nodes too, whose whole step is timed.
    assert asked == [["verify 2", "verify 4", "verify 6"]] * 2
    # The rest of a step is 5 - 0.9 - 4 = 0.1 ms.
    times = {"plain_ms": 2.0, "verify_ms": 2.0, "draft_ms": 0.9}
    assert cells[1] == {"batch_size": 1, "nodes": 1, **times, "break_even": pytest.approx(0.5)}
    with pytest.raises(UserError, match="--sweep needs a draft"):
        measured.sweep(swept.plain(), [1], [4], 10, 3)


PRODUCTS = ("dot", "custom-call", "convolution")

ROWS = 5  # of no other test's arrays
REQUESTS = [Request(0, [1, 2, 3], 9)]


def products(function, *arguments):
    """Return how many products a compiled function computes, by how often each is computed."""
    program = Program(jax.jit(function).lower(*arguments).compile().as_text())
    found = Counter()

    def count(name, times):
        for instruction in program.computations[name].instructions.values():
            found[times] += instruction.opcode in PRODUCTS
            if instruction.calls:
                count(instruction.calls, times)

    for name, loops in program.executed.items():
        count(name, loops.times(1))
    return found


@pytest.mark.parametrize("kind", ["medusa", "clover", "clover2"])
def test_drafting_is_computed_whole_in_every_turn(kind):
    subject = load(spec(kind, "chain:3"))
    config, weights = subject.step(), subject.weights
    state = running_state(subject, 2, 64, 9)
    in_loop = products(functools.partial(draft_loop, config), weights, state)
    once = products(functools.partial(draft, config), weights, state)
    assert in_loop[STEPS] >= once[1] > 2


@pytest.fixture(scope="module")
def stages():
    return parts.Bench(load(spec("clover2", "chain:1")), 1, 512, 100)


def test_commit_is_handed_what_it_gathers(stages, monkeypatch):
    handed = []
    commit = parts.commit

    def spied(*arguments, **options):
        handed.append(jax.tree.leaves(arguments))
        return commit(*arguments, **options)

    monkeypatch.setattr(parts, "commit", spied)
    part = parts.stage_parts(stages)["commit"]
    _, record = part.run()
    assert record.accepted.shape == (1,)
    assert len(handed) == 2  # traced to count its work, and to be compiled
    assert all(isinstance(leaf, jax.core.Tracer) for leaves in handed for leaf in leaves)


@pytest.fixture(scope="module")
def method():
    """A small head on a mesh of one device."""
    config = dataclasses.replace(TINY, num_layers=1)
    head, params = random_head(config, "medusa-shared")
    base = BaseModel(config, random_base(config), Path(), "random")
    draft = Draft(head, params, None, {}, "random")
    return Method("a", Models(base, None, draft, parse_tree("chain:1"), make_mesh(MeshShape())))


def cache_bytes():
    arrays = jax.live_arrays()
    return sum(x.nbytes for x in arrays if x.ndim == 4 and x.shape[0] == ROWS)


def test_one_state_is_held_and_every_program_knows_the_mesh(way, method, monkeypatch, logits_specs):
    engine, wait, held = method.models.engine(ROWS), jax.block_until_ready, []

    def waiting(arrays):
        held.append(cache_bytes())
        return wait(arrays)

    monkeypatch.setattr(jax, "block_until_ready", waiting)
    times = parts.measure(method, engine, REQUESTS)
    assert min(times.step, times.draft, times.verify) > 0
    assert (times.batch_size, times.context) == (ROWS, 4)
    state = engine.prefilled(method.models.base.params, method.models.draft_params, REQUESTS)
    assert set(held) == {cache_bytes()}
    assert state.cache[0].key.nbytes > 0
    assert logits_specs
    assert None not in logits_specs


def test_the_compiler_gets_the_options_of_decoding(method, monkeypatch):
    monkeypatch.setattr(parts, "options_here", lambda: {"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        parts.measure(method, method.models.engine(ROWS), REQUESTS)
