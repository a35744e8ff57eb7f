"""Counting what a program must read and multiply."""

import jax
import jax.numpy as jnp

from clover_jax.evaluation.compiled import Work, count_work


def test_a_product_reads_its_weight_and_a_look_up_reads_nothing():
    def function(weights, x):
        return jnp.einsum("bd,vd->bv", x, weights["matrix"]) + weights["table"][3]

    weights = {"matrix": jnp.zeros((7, 5)), "table": jnp.zeros((4, 7))}
    assert count_work(function, weights, jnp.zeros((2, 5))) == Work(7 * 5 * 4, 140, 140)
    # One without weights counts among all products only; a part of a weight as large as it is.
    assert count_work(lambda w, x: x @ x, jnp.zeros(3), jnp.zeros((4, 4))) == Work(0, 0, 128)
    part = count_work(lambda w, x: x @ w[0].T, jnp.zeros((2, 3, 5)), jnp.zeros((1, 5)))
    assert part == Work(60, 30, 30)


def test_inner_functions_and_loops_count_as_often_as_they_run():
    def function(weights, x):
        def body(x, _):
            return jax.jit(lambda w, x: x @ w)(weights, x), None

        return jax.lax.scan(body, x, length=3)[0]

    assert count_work(function, jnp.zeros((5, 5)), jnp.zeros((1, 5))) == Work(300, 150, 150)


def test_loops_over_data_count_as_often_as_the_caller_says_and_branches_once():
    def function(weights, x, count):
        x = jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)
        return jax.lax.cond(count > 2, lambda x: x @ x, lambda x: x, x)

    given = jnp.zeros(()), jnp.zeros((4, 4)), jax.ShapeDtypeStruct((), jnp.int32)
    assert count_work(function, *given, loop_trips=3) == Work(0, 0, (3 + 1) * 2 * 4**3)


def test_of_the_ways_for_platforms_that_of_the_platform_counts():
    def function(weights, x):
        ways = {"tpu": lambda x: x @ weights, "default": lambda x: x @ weights @ weights}
        return jax.lax.platform_dependent(x, **ways)

    given = jnp.zeros((5, 5)), jnp.zeros((1, 5))
    assert count_work(function, *given, platform="tpu") == Work(100, 50, 50)
    assert count_work(function, *given, platform="cuda") == Work(200, 100, 100)
    assert count_work(function, *given) == Work(200, 100, 100)  # on this CPU


def test_grouped_rows_read_a_matrix_each_at_most():
    def function(weights, rows):
        return jax.lax.ragged_dot(rows, weights, jnp.array([1, 0, len(rows) - 1]))

    matrix, size = 5 * 7, 4 * 5 * 7
    for rows, read in ((2, 2), (9, 3)):
        work = count_work(function, jnp.zeros((3, 5, 7)), jnp.zeros((rows, 5)))
        assert work == Work(read * size, 2 * rows * matrix, 2 * rows * matrix)
