"""What a step commits, and what the compilers make of it: one trace, no cache-sized copy."""

import contextlib
import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.checkpoints.shapes import base_shapes, cast_shapes
from clover_jax.decoding import programs
from clover_jax.decoding.accept import Accepted
from clover_jax.decoding.emission import (
    _by_position,
    append_bonus,
    cut,
    sibling_ranks,
    write_tokens,
)
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.programs import Placement, decode_chunk
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig
from clover_jax.decoding.state import EOS, LENGTH, RUNNING, empty_state
from clover_jax.decoding.step import (
    StepConfig,
    Weights,
    commit,
    speculate_and_verify,
    verify_tree,
    weights_for,
)
from clover_jax.decoding.tree import TokenTree
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters import registry
from clover_jax.models.cache import KeyValue, write_rows
from clover_jax.models.decoder import Decoder, causal_mask
from experiments.aot.hlo import Program
from tests.decoding.test_greedy_equality import HYBRID
from tests.tiny_models import LLAMA3_8B, TINY, decode_all, random_base, random_head, random_prompts

MOST_STEPS = 6


@pytest.mark.parametrize(
    ("count", "room", "eos", "emitted", "finish"),
    [
        (3, 8, 2, 2, EOS),  # of the docstring
        (3, 8, -1, 3, RUNNING),
        (3, 3, -1, 3, LENGTH),
        (3, 2, -1, 2, LENGTH),
        (3, 2, 2, 2, EOS),  # the EOS token is the last that fits
        (3, 1, 2, 1, LENGTH),  # it would come after the limit
        (1, 8, 2, 1, RUNNING),  # it lies beyond the accepted tokens
    ],
)
def test_the_first_of_eos_and_limit_ends_a_row(count, room, eos, emitted, finish):
    tokens, eos = jnp.array([[4, 2, 9]]), jnp.array([[eos]])
    emission = cut(tokens, jnp.array([count]), jnp.array([room]), eos)
    assert (emission.count.tolist(), emission.finish.tolist()) == ([emitted], [finish])


def test_the_examples_of_the_docstrings():
    tokens = append_bonus(jnp.array([[7, 8, 0]]), jnp.array([2]), jnp.array([4]))
    assert tokens.tolist() == [[7, 8, 4, 4]]
    written = write_tokens(jnp.array([[5, 6, 0, 0]]), jnp.array([[7, 8]]), jnp.array([1]))
    assert written.tolist() == [[5, 7, 8, 0]]
    ranks = sibling_ranks(jnp.array([[-1, 0, 0, 1, 0]]), jnp.array([[4, 3, 2]]))
    assert ranks.tolist() == [[2, 0, 1]]


def test_a_tpu_writes_the_same_tokens_in_its_own_way():
    tokens, new = jnp.arange(20).reshape(2, 10), jnp.array([[-1, -2, -3], [-4, -5, -6]])
    start = jnp.array([7, 0])  # up to the last position, and from the first
    written = _by_position(tokens, new, start)
    assert written.tolist() == write_tokens(tokens, new, start).tolist()
    assert written[0, 6:].tolist() == [6, -1, -2, -3]


SLOTS, PREFIX = 7, 20


@st.composite
def paths_in_trees(draw):
    """A random tree for each of two rows, a path in it, and ragged lengths."""
    parents, paths = [], []
    for _ in range(2):
        parent = [-1, *(draw(st.integers(0, slot - 1)) for slot in range(1, SLOTS))]
        path = [draw(st.integers(0, SLOTS - 1))]
        while path[0]:
            path.insert(0, parent[path[0]])
        parents.append(parent)
        paths.append(path)
    lengths = draw(st.lists(st.integers(1, PREFIX), min_size=2, max_size=2))
    return parents, paths, lengths, draw(st.integers(0, 2**30))


HYBRID_BASE = dataclasses.replace(TINY, num_layers=2, **HYBRID)


@pytest.mark.parametrize("base", [TINY, HYBRID_BASE], ids=["attention", "delta nets"])
@settings(deadline=None, max_examples=8)
@given(case=paths_in_trees())
def test_the_cache_after_commit_is_that_of_a_plain_prefill(base, case):
    parents, paths, lengths, seed = case
    params, depth = random_base(base), SLOTS - 1
    tree_config = TreeConfig("chain", tuple((0,) * d for d in range(1, SLOTS)))  # fixes A only
    state = _empty_state(base, None, tree_config, 2, 64, 1, jnp.float32)
    rng = np.random.default_rng(seed)
    text = rng.integers(0, TINY.vocab_size, (2, 64))
    length = jnp.array(lengths)
    here = {"length": length, "end": length + 1, "limit": length + 40}
    tokens, running = jnp.asarray(text, jnp.int32), jnp.zeros(2, jnp.int32)
    state = state.replace(tokens=tokens, finish=running, **here)
    before = _prefill(base, params, jnp.asarray(text[:, :PREFIX]))
    state = state.replace(
        cache=write_rows(state.cache, before.fresh, jnp.zeros(2, jnp.int32), length),
        # The head's features are not under test here.
        features=jnp.zeros((2, SLOTS, 0)),
    )
    tokens = rng.integers(0, TINY.vocab_size, (2, SLOTS))
    tokens[:, 0] = text[np.arange(2), lengths]
    tree = TokenTree(jnp.asarray(tokens), jnp.array(parents), depth)
    verified = _verify(base, params, state, tree)
    padded = jnp.array([path + [0] * (SLOTS - len(path)) for path in paths])
    count = jnp.array([len(path) - 1 for path in paths])
    accepted = Accepted(padded, count, jnp.array([3, 4]))

    new, record = jax.jit(commit)(state, tree, accepted, verified.fresh, verified.features)

    assert record.emitted.tolist() == [len(path) for path in paths]
    assert record.proposed.tolist() == [SLOTS - 1] * 2
    for row, path in enumerate(paths):
        earlier = [parents[row][1:slot].count(parents[row][slot]) for slot in path[1:]]
        assert record.ranks[row, : len(path) - 1].tolist() == earlier
    for row, path in enumerate(paths):
        start, emitted = lengths[row], len(path)
        expected_text = [*text[row, :start], *tokens[row, path], 3 + row]
        end = int(new.end[row])
        assert new.tokens[row, :end].tolist() == expected_text
        assert int(new.length[row]) == start + emitted == end - 1
        committed = np.zeros((1, 40), np.int32)
        committed[0, : end - 1] = expected_text[:-1]
        plain = _prefill(base, params, jnp.asarray(committed))
        empty = _empty_state(base, None, tree_config, 1, 64, 1, jnp.float32).cache
        written = write_rows(empty, plain.fresh, jnp.zeros(1, jnp.int32), jnp.array([end - 1]))
        for layer, expected in zip(new.cache, written, strict=True):
            # A state has no positions, and must be the same as a whole.
            live = slice(end - 1) if isinstance(layer, KeyValue) else slice(None)
            for got, want in zip(jax.tree.leaves(layer), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(got[row, :, live], want[0, :, live], atol=2e-5)


def test_a_finished_row_does_not_change():
    tree_config = TreeConfig("chain", ((0,),))
    state = _empty_state(TINY, None, tree_config, 1, 64, 1, jnp.float32)
    state = state.replace(
        tokens=jnp.arange(64)[None], length=jnp.array([5]), end=jnp.array([6]), limit=jnp.array([6])
    ).replace(finish=jnp.array([LENGTH]), features=jnp.zeros((1, 2, 0)))
    tree = TokenTree(jnp.array([[5, 7]]), jnp.array([[-1, 0]]), depth=1)
    verified = _verify(TINY, random_base(), state, tree)
    accepted = Accepted(jnp.array([[0, 1]]), jnp.array([1]), jnp.array([3]))
    new, record = jax.jit(commit)(state, tree, accepted, verified.fresh, verified.features)
    for name in ("tokens", "length", "end", "limit", "finish"):
        np.testing.assert_array_equal(getattr(new, name), getattr(state, name), err_msg=name)
    for layer, old in zip(new.cache, state.cache, strict=True):
        np.testing.assert_array_equal(layer.key[:, :, :5], old.key[:, :, :5])
    assert (record.accepted.tolist(), record.emitted.tolist()) == ([0], [0])
    assert record.proposed.tolist() == [0]


@functools.partial(jax.jit, static_argnums=0)
def _prefill(base, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Decoder(base).apply({"params": params}, tokens, positions, causal_mask(*tokens.shape))


@functools.partial(jax.jit, static_argnums=0)
def _verify(base, params, state, tree):
    plain = StepConfig(base, None, TreeConfig.root_only())
    return verify_tree(plain, Weights(params, {}), state, tree)


_empty_state = jax.jit(empty_state, static_argnums=tuple(range(7)))


def chunk_and_shapes(
    base, dtype, batch=3, size=512, steps=4, kind="clover2", tree="paper25", sampling=GREEDY
):
    """Return the jitted chunk of steps and its arguments as shapes; kind None decodes plainly.

    steps: 0 is the step by itself, as accelerators run it.
    """
    head = registry.head(registry.config_for_base(kind, base)) if kind else None
    tree = parse_tree(tree) if head else TreeConfig.root_only()
    base_params = base_shapes(base, dtype)
    params = cast_shapes(registry.init_shapes(head, base_params), dtype) if head else {}
    state = jax.eval_shape(lambda: empty_state(base, head, tree, batch, size, 8, dtype))
    weights, config = Weights(base_params, params), StepConfig(base, head, tree, sampling)
    if not steps:
        step = functools.partial(speculate_and_verify, config)
        return jax.jit(step, donate_argnums=1), (weights, state)
    chunk = jax.jit(functools.partial(decode_chunk, config, steps), donate_argnums=1)
    return chunk, (weights, state, jax.ShapeDtypeStruct((batch,), bool))


STEPS = {
    "tree": {},
    "adaptive": {"tree": "dynamic:8:3:2"},
    "forced": {"sampling": SamplingConfig(force_accept=2)},
    "plain": {"kind": None},
    "chunk of one": {"kind": None, "steps": 1},
    "step": {"steps": 0},
    "plain step": {"kind": None, "steps": 0},
}
# The other batch of each is slow, and the forced step, which is that of the tree.
USUAL = {"tree": 3, "adaptive": 1, "plain": 1, "chunk of one": 3, "step": 1, "plain step": 3}


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(name, batch, marks=() if USUAL.get(name) == batch else pytest.mark.slow)
        for name in STEPS
        for batch in (1, 3)
    ],
)
def test_the_compiled_step_copies_no_cache(name, batch):
    # Sizes that nothing else in the program has.
    function, shapes = chunk_and_shapes(TINY, jnp.float32, batch=batch, size=768, **STEPS[name])
    compiled, state = function.lower(*shapes).compile(), shapes[1]
    caches = jax.tree.leaves((state.cache, state.draft_cache))
    assert {x.shape for x in caches} == {(batch, 2, 768, 8)}
    assert Program(compiled.as_text()).made((batch, 2, 768, 8)) == []
    cache_bytes = sum(x.size * 4 for x in caches)
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes


@pytest.mark.parametrize(
    "what", [{"steps": 4}, {"steps": 0}, {"sampling": SamplingConfig(verify="lossless")}], ids=str
)
def test_the_compiled_step_copies_no_table_of_successors(what):
    function, shapes = chunk_and_shapes(TINY, jnp.float32, kind="recycle", tree="chain:4", **what)
    compiled, state = function.lower(*shapes).compile(), shapes[1]
    table = state.draft_cache
    assert table.shape == (3, 8, TINY.vocab_size)
    assert Program(compiled.as_text()).made(table.shape) == []
    kept = sum(x.size * 4 for x in jax.tree.leaves((state.cache, table)))
    assert compiled.memory_analysis().alias_size_in_bytes >= kept


@pytest.mark.parametrize(
    ("base", "dtype"), [(TINY, jnp.float32), (LLAMA3_8B, jnp.bfloat16)], ids=["tiny", "8b"]
)
def test_the_step_lowers_for_accelerators_with_a_top_k_of_rank_two_for_a_gpu(base, dtype):
    function, shapes = chunk_and_shapes(base, dtype, batch=4, size=2048, steps=0)
    traced = function.trace(*shapes)
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.dot_general" in text
    operands = re.findall(r"chlo.top_k\(.*: tensor<(\S+)xf32>", text)
    assert operands
    assert [shape for shape in operands if shape.count("x") != 1] == []


def test_a_bfloat16_step_widens_no_matrix():
    function, shapes = chunk_and_shapes(TINY, jnp.bfloat16)
    text = function.lower(*shapes).as_text()
    products = re.findall(r"stablehlo.dot_general.*: \((\S+), (\S+)\) ->", text)
    assert products
    assert [p for p in products if "f32" in p[0] + p[1]] == []


def test_a_second_run_of_the_same_bucket_compiles_nothing():
    head, draft_params = random_head()
    engine = Engine(TINY, head, parse_tree("chain:2"), batch_size=2)
    with compilations() as first:
        decode_all(engine, random_base(), draft_params, random_prompts(3), 20)
    assert first  # the event still has this name
    with compilations() as again:
        decode_all(engine, random_base(), draft_params, random_prompts(5, seed=1), 30)
    assert again == []


@contextlib.contextmanager
def compilations():
    """Collect the compilations that happen inside, found in a cache on disk or not."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def plain_chunk(room, filled):
    """Return a state's rows before and after a chunk of plain steps, and its records.

    room: tokens that each row emits after its first, one a step.
    """
    engine = Engine(TINY, None, TreeConfig.root_only(), batch_size=len(filled))
    prompts = random_prompts(len(room), seed=3)
    requests = [Request(i, p, 1 + n) for i, (p, n) in enumerate(zip(prompts, room, strict=True))]
    state = engine.prefilled(random_base(), None, requests)
    end = np.asarray(state.end)
    run = programs.compile_chunk(engine.config, MOST_STEPS, Placement(None))
    weights = weights_for(None, random_base(), None)
    state, records = run(weights, state, np.array(filled))
    return end, state, programs.read_records(records)


def test_a_chunk_runs_all_its_steps_where_no_row_ends(way):
    end, state, record = plain_chunk([50, 50], [True, True])
    assert record.emitted.tolist() == [[1, 1]] * MOST_STEPS
    assert (state.end - end).tolist() == [MOST_STEPS, MOST_STEPS]


def test_a_chunk_ends_where_a_row_ends(way):
    end, state, record = plain_chunk([50, 2], [True, True])
    steps = {"in a loop": 2, "by calls": 2 + programs.QUEUED - 1}[way]
    assert record.emitted[:, 0].tolist() == [1] * steps + [0] * (len(record.emitted) - steps)
    assert record.emitted[:, 1].sum() == 2
    assert (state.end - end).tolist() == [steps, 2]
    assert (np.asarray(state.finish) == RUNNING).tolist() == [True, False]


def test_empty_slots_end_no_chunk_and_a_row_that_ended_with_its_prompt_does(way):
    _, _, record = plain_chunk([50], [True, False])
    assert record.emitted.tolist() == [[1, 0]] * MOST_STEPS
    _, _, record = plain_chunk([0, 50], [True, True])
    assert record.emitted[:, 1].sum() == {"in a loop": 0, "by calls": programs.QUEUED}[way]


@pytest.mark.parametrize("tree", [pytest.param("paper25", marks=pytest.mark.slow), "dynamic:8:3:2"])
def test_calls_and_loops_decode_the_same(tree, monkeypatch, fresh_programs):
    head, params = random_head()
    requests = [Request(i, p, 5 + 9 * (i % 3)) for i, p in enumerate(random_prompts(7, seed=6))]

    def rows():
        engine = Engine(TINY, head, parse_tree(tree), batch_size=3)
        done = [p.row for p in engine.stream(random_base(), params, requests) if p.done]
        told = operator.attrgetter("output_ids", "accepted", "proposed", "ranks", "finish_reason")
        return {row.index: told(row) for row in done}

    looped = rows()
    monkeypatch.setattr(programs, "loops_on_device", lambda: False)
    programs.compile_programs.cache_clear()
    assert rows() == looped
    assert len(looped) == 7
