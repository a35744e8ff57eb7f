"""What the compilers make of the step: one trace, no cache-sized copy, every platform."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from clover_jax.benchmark.hlo import Program
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights, decode_chunk
from clover_jax.decoding.tree import parse_tree
from clover_jax.drafters import registry
from clover_jax.models.shapes import base_shapes, cast_shapes
from tests.tiny_models import LLAMA3_8B, TINY, random_base, random_head, random_prompts


def chunk_and_shapes(base, dtype, batch=3, size=512, steps=4):
    """Return the jitted chunk of steps and its arguments as shapes."""
    head, tree = registry.head(registry.config_for_base("clover2", base)), parse_tree("paper25")
    base_params = base_shapes(base, dtype)
    weights = Weights(base_params, cast_shapes(registry.init_shapes(head, base_params), dtype))
    state = jax.eval_shape(lambda: empty_state(base, head, tree, batch, size, 8, dtype))
    program = functools.partial(decode_chunk, StepConfig(base, head, tree), steps)
    return jax.jit(program, donate_argnums=1), weights, state


def test_the_compiled_step_copies_no_cache():
    # Sizes that nothing else in the program has.
    function, weights, state = chunk_and_shapes(TINY, jnp.float32, batch=3, size=768)
    compiled = function.lower(weights, state).compile()
    shapes = {x.shape for x in jax.tree.leaves((state.cache, state.draft_cache))}
    assert shapes == {(3, 2, 768, 8)}
    assert Program(compiled.as_text()).made((3, 2, 768, 8)) == []
    cache_bytes = sum(x.size * 4 for x in jax.tree.leaves((state.cache, state.draft_cache)))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    ("base", "dtype"), [(TINY, jnp.float32), (LLAMA3_8B, jnp.bfloat16)], ids=["tiny", "8b"]
)
def test_the_step_lowers_for_accelerators(platform, base, dtype):
    function, weights, state = chunk_and_shapes(base, dtype, batch=4, size=2048)
    lowered = function.trace(weights, state).lower(lowering_platforms=(platform,))
    assert "stablehlo.while" in lowered.as_text()


def test_a_bfloat16_step_widens_no_matrix():
    function, weights, state = chunk_and_shapes(TINY, jnp.bfloat16)
    text = function.lower(weights, state).as_text()
    products = re.findall(r"stablehlo.dot_general.*: \((\S+), (\S+)\) ->", text)
    assert products
    assert [p for p in products if "f32" in p[0] + p[1]] == []


def test_what_a_gpu_gets_as_top_k_has_rank_two():
    function, weights, state = chunk_and_shapes(LLAMA3_8B, jnp.bfloat16)
    text = function.trace(weights, state).lower(lowering_platforms=("cuda",)).as_text()
    operands = re.findall(r"chlo.top_k\(.*: tensor<(\S+)xf32>", text)
    assert operands
    assert [shape for shape in operands if shape.count("x") != 1] == []


def test_a_second_run_of_the_same_bucket_compiles_nothing():
    head, draft_params = random_head()
    engine = Engine(TINY, head, parse_tree("chain:2"), batch_size=2)
    with compilations() as first:
        engine.generate(random_base(), draft_params, random_prompts(3), 20)
    assert first  # the event still has this name
    with compilations() as again:
        engine.generate(random_base(), draft_params, random_prompts(5, seed=1), 30)
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
