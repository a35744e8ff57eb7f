"""How the parts of a step are timed: with one state, compiled and placed as the engine's steps."""

import dataclasses
from pathlib import Path

import jax
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.draft_directory import Draft
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import Request
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.evaluation import stage_times
from clover_jax.evaluation.plan import Method
from clover_jax.models.meshes import MeshShape, make_mesh
from tests.tiny_models import TINY, random_base, random_head

ROWS = 5  # of no other test's arrays
REQUESTS = [Request(0, [1, 2, 3], 9)]


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
    times = stage_times.measure(method, engine, REQUESTS)
    assert min(times.step, times.draft, times.verify) > 0
    assert (times.batch_size, times.context) == (ROWS, 4)
    state = engine.prefilled(method.models.base.params, method.models.draft_params, REQUESTS)
    assert set(held) == {cache_bytes()}
    assert state.cache[0].key.nbytes > 0
    assert logits_specs
    assert None not in logits_specs


def test_the_compiler_gets_the_options_of_decoding(method, monkeypatch):
    monkeypatch.setattr(stage_times, "options_here", lambda: {"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        stage_times.measure(method, method.models.engine(ROWS), REQUESTS)
