"""Counting what a program must read and multiply."""

import jax
import jax.numpy as jnp

from clover_jax.decoding.tree import Grower, draft_static, top_children
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters.clover2 import Clover2State
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.xla.work import Work, count_flops, count_work
from tests.tiny_models import TINY, random_base, random_head


def test_a_product_reads_its_weight_and_a_look_up_reads_nothing():
    def function(weights, x):
        return jnp.einsum("bd,vd->bv", x, weights["matrix"]) + weights["table"][3]

    weights = {"matrix": jnp.zeros((7, 5)), "table": jnp.zeros((4, 7))}
    assert count_work(function, weights, jnp.zeros((2, 5))) == Work(7 * 5 * 4, 2 * 2 * 7 * 5)


def test_a_product_without_weights_does_not_count():
    assert count_work(lambda w, x: x @ x, jnp.zeros(3), jnp.zeros((4, 4))) == Work()


def test_a_slice_of_a_weight_counts_as_large_as_it_is():
    def function(weights, x):
        return x @ weights[0].T

    assert count_work(function, jnp.zeros((2, 3, 5)), jnp.zeros((1, 5))) == Work(60, 30)


def test_inner_functions_and_loops_count_as_often_as_they_run():
    def function(weights, x):
        def body(x, _):
            return jax.jit(lambda w, x: x @ w)(weights, x), None

        return jax.lax.scan(body, x, length=3)[0]

    assert count_work(function, jnp.zeros((5, 5)), jnp.zeros((1, 5))) == Work(300, 150)


def test_of_the_ways_for_platforms_that_of_the_platform_counts():
    def function(weights, x):
        ways = {"tpu": lambda x: x @ weights, "default": lambda x: x @ weights @ weights}
        return jax.lax.platform_dependent(x, **ways)

    given = jnp.zeros((5, 5)), jnp.zeros((1, 5))
    assert count_work(function, *given, platform="tpu") == Work(100, 50)
    assert count_work(function, *given, platform="cuda") == Work(200, 100)
    assert count_flops(function, *given, platform="tpu") == 50
    assert count_flops(function, *given) == 100  # on this CPU


def test_grouped_rows_read_a_matrix_each_at_most():
    def function(weights, rows):
        return jax.lax.ragged_dot(rows, weights, jnp.array([1, 0, len(rows) - 1]))

    matrix, size = 5 * 7, 4 * 5 * 7
    for rows, read in ((2, 2), (9, 3)):
        work = count_work(function, jnp.zeros((3, 5, 7)), jnp.zeros((rows, 5)))
        assert work == Work(read * size, 2 * rows * matrix)


def test_every_draft_level_reads_the_vocabulary_matrix_anew():
    head, params = random_head()
    base = random_base()

    def levels(count):
        def function(weights, root):
            state = Clover2State(jnp.zeros((1, 1, 32)), jnp.zeros((1, 1, 32)))
            frozen = frozen_from_base(weights[0])
            tree = parse_tree(f"chain:{count}")
            grower = Grower(head, weights[1], frozen, ())
            return draft_static(grower, root, state, tree, top_children)

        return count_work(function, (base, params), jnp.zeros(1, jnp.int32)).weight_bytes

    vocabulary, width = TINY.vocab_size, TINY.hidden_size
    decoder, projector = 3 * width * width, 2 * width * width
    assert levels(3) - levels(2) == 4 * (vocabulary * width + decoder + projector)
    assert levels(1) == 4 * (vocabulary * width + width * width)
