"""A part that is timed in a loop on the device does all of its work in every turn of it."""

import functools
from collections import Counter

import jax
import pytest

from clover_jax.decoding.models import load, running_state
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.step import absorb_and_draft, roots
from clover_jax.evaluation.parts import STEPS, draft_loop
from experiments.aot.hlo import Program

PRODUCTS = ("dot", "custom-call", "convolution")


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
