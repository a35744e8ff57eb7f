"""Count the work of a traced program: bytes of weights that products read, and their FLOPs.

Every product with a weight reads that weight: a matrix used by five draft levels is read five
times, as if no cache held it. Looking up rows (embeddings) is left out. A product of grouped rows
(experts) reads one matrix for each row, at most all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from clover_jax.array_types import Params

# These only rearrange or cut out: the product that uses the result reads that much of the weight.
_REARRANGING = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims"),
    *("reshape", "sharding_constraint", "slice", "squeeze", "transpose"),
}
_GROUPED = "ragged_dot_general"


class Work(NamedTuple):
    """weight_bytes: read by products with weights. flops: of these. all_flops: of all products."""

    weight_bytes: float = 0.0
    flops: float = 0.0
    all_flops: float = 0.0


def count_work(
    function: Callable[..., Any],
    weights: Params,
    *arguments: Any,
    loop_trips: int = 1,
    platform: str | None = None,
) -> Work:
    """Return the work of `function(weights, *arguments)`; arrays or ShapeDtypeStructs.

    loop_trips: iterations of a loop whose count is data. Such loops read caches, no weights.
    platform: "cpu", "tpu" or "cuda"; None is the platform of this process.
    """
    jaxpr = jax.make_jaxpr(function)(weights, *arguments).jaxpr
    # The weights come first among the program's arguments.
    sizes = [np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(weights)]
    sizes += [0] * (len(jaxpr.invars) - len(sizes))
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return _visit(jaxpr, sizes, loop_trips, platform or here)[0]


def _visit(jaxpr: core.Jaxpr, sizes: list[int], trips: int, platform: str) -> tuple[Work, list]:
    """Return the work, and the bytes at rest of an entry of each result.

    sizes: bytes at rest of an entry of each argument; 0 if it is not (a part of) a weight. At
        rest, because widening a weight for a product does not make it larger in memory.
    """
    at_rest: dict[Any, int] = dict(zip(jaxpr.invars, sizes, strict=True))

    def size_of(operand: Any) -> int:
        return 0 if isinstance(operand, core.Literal) else at_rest.get(operand, 0)

    totals = np.zeros(3)
    for equation in jaxpr.eqns:
        given = [size_of(operand) for operand in equation.invars]
        name, results = equation.primitive.name, [0] * len(equation.outvars)

        if name in ("dot_general", _GROUPED):
            totals += _product(equation, given)
        elif name in _REARRANGING:
            results = [given[0]] * len(results)
        elif name == "cond":  # its first operand selects the branch
            works = [
                _visit(b, given[1:], trips, platform)[0] for b in _branches(equation, platform)
            ]
            totals += np.max(works, axis=0)
        else:
            times = {"scan": equation.params.get("length"), "while": trips}.get(name, 1)
            for inner in _inner(equation):
                is_call = name != "while" and len(inner.invars) == len(given)
                known = given if is_call else [0] * len(inner.invars)
                work, found = _visit(inner, known, trips, platform)
                totals += times * np.array(work)
                # What passes a weight on without computing keeps its size at rest.
                if is_call and name != "scan" and len(found) == len(results):
                    results = found

        at_rest.update(zip(equation.outvars, results, strict=True))
    return Work(*totals.tolist()), [size_of(var) for var in jaxpr.outvars]


def _product(equation: core.JaxprEqn, sizes: list[int]) -> Work:
    shapes: list[Any] = [operand.aval for operand in (*equation.invars, *equation.outvars)]
    left, right, *_, result = (array.shape for array in shapes)
    is_grouped = equation.primitive.name == _GROUPED
    numbers: Any = equation.params[
        "ragged_dot_dimension_numbers" if is_grouped else "dimension_numbers"
    ]
    (contracted, _), _ = numbers.dot_dimension_numbers if is_grouped else numbers

    # Each entry of the result sums over the contracted axes.
    inner = math.prod(left[axis] for axis in contracted)
    flops = 2.0 * math.prod(result) * inner
    if not any(sizes):
        return Work(all_flops=flops)
    entries = [math.prod(array.shape) for array in shapes[:-1]]
    if is_grouped:  # rows of one group read its matrix once
        entries[1] = entries[1] * min(left[0], right[0]) // right[0]
    read = sum(size * count for size, count in zip(sizes, entries, strict=True))
    return Work(float(read), flops, flops)


def _branches(equation: core.JaxprEqn, platform: str) -> list[core.Jaxpr]:
    """Return the branches of a cond that may run; of `platform_dependent` the platform's own."""
    branches = [branch.jaxpr for branch in equation.params["branches"]]
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return branches
    # The last one, for all other platforms, has no names.
    named = zip(branches, platforms, strict=True)
    return [next(branch for branch, names in named if names is None or platform in names)]


def _inner(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Return the programs that an equation calls, such as a jitted function's; most call none."""
    listed = [v for p in equation.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    # In jax 0.12 one class is both, so a closed one must not be counted as open again.
    return [
        v.jaxpr if isinstance(v, core.ClosedJaxpr) else v
        for v in listed
        if isinstance(v, core.ClosedJaxpr | core.Jaxpr)
    ]
