"""The parts of a step: whole, compiled and placed as the steps of an engine."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import jax
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.decoding.models import Models, load, running_state
from clover_jax.decoding.requests import Request
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.step import absorb_and_draft, roots
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.evaluation import parts
from clover_jax.evaluation.parts import STEPS, draft_loop
from clover_jax.evaluation.plan import Method
from clover_jax.models.meshes import MeshShape, make_mesh
from experiments.aot.hlo import Program
from tests.tiny_models import TINY, random_base, random_head

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
    subject = load(
        ModelSpec("shape:64x1x96", draft=f"random:{kind}", tree="chain:3", dtype="float32")
    )
    config, weights = subject.step(), subject.weights
    state = running_state(subject, 2, 64, 9)
    in_loop = products(functools.partial(draft_loop, config), weights, state)
    once = products(lambda w, s: absorb_and_draft(config, w, s, roots(s)), weights, state)
    assert in_loop[STEPS] >= once[1] > 2


@pytest.fixture(scope="module")
def bench():
    subject = load(
        ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:1", dtype="float32")
    )
    return parts.Bench(subject, 1, 512, 100)


def test_commit_is_handed_what_it_gathers(bench, monkeypatch):
    handed = []
    commit = parts.commit

    def spied(*arguments, **options):
        handed.append(jax.tree.leaves(arguments))
        return commit(*arguments, **options)

    monkeypatch.setattr(parts, "commit", spied)
    part = parts.stage_parts(bench)["commit"]
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
