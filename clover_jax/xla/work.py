"""What a function must read and multiply at least, counted in its traced program.

Every product with a weight reads that weight: a matrix used by five draft levels is read five
times, since none fits a cache. Looking up rows (embeddings) costs next to nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from clover_jax.array_types import Params

# What only rearranges or cuts out: the product that uses the result reads that much of the weight.
_REARRANGING = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "expand_dims",
    "reshape",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
}


class Work(NamedTuple):
    """weight_bytes: read by products with weights. flops: of these products."""

    weight_bytes: float = 0.0
    flops: float = 0.0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return the work of both, the other done `times` times."""
        return Work(
            self.weight_bytes + times * other.weight_bytes, self.flops + times * other.flops
        )


def count_work(function: Callable[..., Any], weights: Params, *arguments: Any) -> Work:
    """Return the work of `function(weights, *arguments)`; arrays or their shapes will do."""
    closed = jax.make_jaxpr(function)(weights, *arguments)
    sizes = [np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(weights)]
    others = len(closed.jaxpr.invars) - len(sizes)
    return _visit(closed.jaxpr, sizes + [0] * others)[0]


def _visit(jaxpr: Any, sizes: list[int]) -> tuple[Work, list[int]]:
    """Return the work, and of each result how many bytes its entries have at rest.

    sizes: the same of each argument; 0 for what is no (part of a) weight. Widening a weight for a
    product does not make it larger at rest.
    """
    at_rest = dict(zip(jaxpr.invars, sizes, strict=True))
    total = Work()
    for equation in jaxpr.eqns:
        given = [_size_of(operand, at_rest) for operand in equation.invars]
        name = equation.primitive.name
        results = [0] * len(equation.outvars)
        if name == "dot_general":
            total = total.plus(_product(equation, given))
        elif name in _REARRANGING:
            results = [given[0]] * len(results)
        elif name == "scan":
            work, _ = _visit(equation.params["jaxpr"].jaxpr, given)
            total = total.plus(work, equation.params["length"])
        elif name == "cond":  # the operand in front says which branch
            branches = [_visit(b.jaxpr, given[1:])[0] for b in equation.params["branches"]]
            total = total.plus(max(branches, key=lambda work: work.weight_bytes))
        elif name != "while":  # attention over the cache, without weights; chunks, uncounted
            inner = _called(equation)
            if inner is not None and len(inner.invars) == len(given):
                work, results = _visit(inner, given)
                total = total.plus(work)
        at_rest.update(zip(equation.outvars, results, strict=True))
    return total, [_size_of(var, at_rest) for var in jaxpr.outvars]


def _size_of(operand: Any, at_rest: dict[Any, int]) -> int:
    return 0 if isinstance(operand, core.Literal) else at_rest.get(operand, 0)


def _called(equation: Any) -> Any:
    """Return the program that an equation calls, such as a jitted function's; None if it is one."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner)


def _product(equation: Any, sizes: list[int]) -> Work:
    if not any(sizes):
        return Work()
    operands = [var.aval for var in equation.invars]
    contracted = equation.params["dimension_numbers"][0][0]
    inner = math.prod(operands[0].shape[axis] for axis in contracted)
    read = sum(size * aval.size for size, aval in zip(sizes, operands, strict=True))
    return Work(read, 2.0 * math.prod(equation.outvars[0].aval.shape) * inner)
