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
    num_weights = len(jax.tree.leaves(weights))
    is_weight = [index < num_weights for index in range(len(closed.jaxpr.invars))]
    return _visit(closed.jaxpr, is_weight)[0]


def _visit(jaxpr: Any, is_weight: list[bool]) -> tuple[Work, list[bool]]:
    """Return the work, and which results are (parts of) weights."""
    weights = {var for var, flag in zip(jaxpr.invars, is_weight, strict=True) if flag}
    total = Work()
    for equation in jaxpr.eqns:
        flags = [_is_in(weights, operand) for operand in equation.invars]
        name = equation.primitive.name
        results = [False] * len(equation.outvars)
        if name == "dot_general":
            total = total.plus(_product(equation, flags))
        elif name in _REARRANGING:
            results = [flags[0]] * len(results)
        elif name == "scan":
            work, _ = _visit(equation.params["jaxpr"].jaxpr, flags)
            total = total.plus(work, equation.params["length"])
        elif name == "cond":  # the operand in front says which branch
            branches = [_visit(b.jaxpr, flags[1:])[0] for b in equation.params["branches"]]
            total = total.plus(max(branches, key=lambda work: work.weight_bytes))
        elif name != "while":  # only attention over the cache loops so: no weights there
            inner = _called(equation)
            if inner is not None and len(inner.invars) == len(flags):
                work, results = _visit(inner, flags)
                total = total.plus(work)
        weights.update(var for var, flag in zip(equation.outvars, results, strict=True) if flag)
    return total, [_is_in(weights, var) for var in jaxpr.outvars]


def _is_in(weights: set, operand: Any) -> bool:
    return not isinstance(operand, core.Literal) and operand in weights


def _called(equation: Any) -> Any:
    """Return the program that an equation calls, such as a jitted function's; None if it is one."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner)


def _product(equation: Any, flags: list[bool]) -> Work:
    if not any(flags):
        return Work()
    operands = [var.aval for var in equation.invars]
    contracted = equation.params["dimension_numbers"][0][0]
    inner = math.prod(operands[0].shape[axis] for axis in contracted)
    read = sum(
        np.dtype(aval.dtype).itemsize * aval.size
        for aval, flag in zip(operands, flags, strict=True)
        if flag
    )
    return Work(read, 2.0 * math.prod(equation.outvars[0].aval.shape) * inner)
