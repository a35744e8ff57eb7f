"""Count the work of a traced program: bytes of weights that products read, and the products.

Every product with a weight reads that weight: a matrix used by five draft levels is read five
times, as if none fitted a cache. Where one does, a program may move less. Looking up rows
(embeddings) costs next to nothing and is left out. A product of grouped rows (experts) reads as
many of the group's matrices as there are rows, at most all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from clover_jax.array_types import Params

# These only rearrange or cut out: the product that uses the result reads that much of the weight.
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

_GROUPED = "ragged_dot_general"
_PRODUCTS = ("dot_general", _GROUPED)


class Work(NamedTuple):
    """weight_bytes: read by products with weights. flops: of these products."""

    weight_bytes: float = 0.0
    flops: float = 0.0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return the work of both, the other done `times` times."""
        return Work(
            self.weight_bytes + times * other.weight_bytes, self.flops + times * other.flops
        )


def count_work(
    function: Callable[..., Any], weights: Params, *arguments: Any, platform: str | None = None
) -> Work:
    """Return the work of `function(weights, *arguments)`; arrays or their shapes will do.

    platform: "cpu", "tpu" or "cuda"; None is this process's.
    """
    closed = jax.make_jaxpr(function)(weights, *arguments)
    # The weights come first among the program's arguments.
    sizes = [np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(weights)]
    others = len(closed.jaxpr.invars) - len(sizes)
    return _visit(closed.jaxpr, sizes + [0] * others, platform or _this_platform())[0]


def count_flops(
    function: Callable[..., Any],
    *arguments: Any,
    loop_trips: int = 1,
    platform: str | None = None,
) -> float:
    """Return the operations of all matrix products of a function; a product and a sum are two.

    arguments: ShapeDtypeStructs. loop_trips: how often loops run whose count is data.
    platform: "cpu", "tpu" or "cuda"; None is this process's.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return _flops(jaxpr, loop_trips, platform or _this_platform())


def _this_platform() -> str:
    name = jax.default_backend()
    return "cuda" if name == "gpu" else name  # as programs for a platform call it


def _visit(jaxpr: core.Jaxpr, sizes: list[int], platform: str) -> tuple[Work, list[int]]:
    """Return the work, and of each result how many bytes its entries have at rest.

    sizes: the same of each argument; 0 for one that is no (part of a) weight.
    """
    # At rest, because widening a weight for a product does not make it larger in memory.
    at_rest = dict(zip(jaxpr.invars, sizes, strict=True))
    total = Work()

    for equation in jaxpr.eqns:
        given = [_size_of(operand, at_rest) for operand in equation.invars]
        name = equation.primitive.name
        results = [0] * len(equation.outvars)

        # Only products read weights; what passes one on without computing keeps its size at rest.
        if name in _PRODUCTS:
            total = total.plus(_product(equation, given))
        elif name in _REARRANGING:
            results = [given[0]] * len(results)
        elif name == "scan":
            work, _ = _visit(equation.params["jaxpr"].jaxpr, given, platform)
            total = total.plus(work, equation.params["length"])
        elif name == "cond":  # the operand in front says which branch
            branches = _branches(equation, platform)
            works = [_visit(branch.jaxpr, given[1:], platform)[0] for branch in branches]
            total = total.plus(max(works, key=lambda work: work.weight_bytes))
        elif name != "while":  # attention over the cache: chunks, without weights
            inner = next(iter(_inner(equation)), None)
            if inner is not None and len(inner.invars) == len(given):
                work, results = _visit(inner, given, platform)
                total = total.plus(work)

        at_rest.update(zip(equation.outvars, results, strict=True))

    return total, [_size_of(var, at_rest) for var in jaxpr.outvars]


def _size_of(operand: Any, at_rest: dict[Any, int]) -> int:
    return 0 if isinstance(operand, core.Literal) else at_rest.get(operand, 0)


def _product(equation: core.JaxprEqn, sizes: list[int]) -> Work:
    if not any(sizes):
        return Work()
    operands = [math.prod(_shape(operand)) for operand in equation.invars]
    if equation.primitive.name == _GROUPED:
        (rows, *_), (groups, *_) = _shape(equation.invars[0]), _shape(equation.invars[1])
        # Rows of one group read its matrix once: at most as many matrices as rows are read.
        operands[1] = operands[1] * min(rows, groups) // groups
    read = sum(size * entries for size, entries in zip(sizes, operands, strict=True))
    return Work(read, _product_flops(equation))


def _flops(jaxpr: core.Jaxpr, loop_trips: int, platform: str) -> float:
    def of(programs: Iterable[core.Jaxpr]) -> list[float]:
        return [_flops(program, loop_trips, platform) for program in programs]

    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _PRODUCTS:
            total += _product_flops(equation)
        elif name == "cond":  # the branches are ways to do the same
            total += max(of(branch.jaxpr for branch in _branches(equation, platform)))
        else:
            times = {"scan": equation.params.get("length", 0), "while": loop_trips}.get(name, 1)
            total += times * sum(of(_inner(equation)))
    return total


def _branches(equation: core.JaxprEqn, platform: str) -> Sequence[core.ClosedJaxpr]:
    """Return the branches of a cond that may run; of `platform_dependent` the platform's own."""
    branches = equation.params["branches"]
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return branches
    # The last one, for all other platforms, has no names.
    named = zip(branches, platforms, strict=True)
    return [next(branch for branch, names in named if names is None or platform in names)]


def _inner(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the programs that an equation calls, such as a jitted function's; most call none."""
    # A branch of several lies in a tuple.
    values = equation.params.values()
    listed = [item for v in values for item in (v if isinstance(v, tuple) else (v,))]
    # In jax 0.12 one class is both, so a closed one must not be counted as open again.
    programs = [v for v in listed if isinstance(v, core.ClosedJaxpr | core.Jaxpr)]
    return [v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in programs]


def _product_flops(equation: core.JaxprEqn) -> float:
    # Each entry of the result sums over the contracted axes.
    if equation.primitive.name == _GROUPED:
        numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        numbers = equation.params["dimension_numbers"]
    (contracted, _), _ = numbers
    inner = math.prod(_shape(equation.invars[0])[axis] for axis in contracted)
    return 2.0 * math.prod(_shape(equation.outvars[0])) * inner


def _shape(operand: Any) -> tuple[int, ...]:
    return operand.aval.shape
