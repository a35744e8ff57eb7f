"""Counting a program's multiplications and additions without compiling or running it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable, *arguments: Any, loop_trips: int = 1) -> float:
    """Return the operations of all matrix products of a function; a product and a sum are two.

    arguments: ShapeDtypeStructs. loop_trips: how often loops run whose count is data.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr, loop_trips)


def _count(jaxpr: core.Jaxpr, loop_trips: int) -> float:
    return sum(_count_equation(equation, loop_trips) for equation in jaxpr.eqns)


def _count_equation(equation: core.JaxprEqn, loop_trips: int) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(*(v.aval.shape for v in equation.invars), params["dimension_numbers"])
    if name == "cond":  # the branches are ways to do the same
        return max(_count(branch.jaxpr, loop_trips) for branch in params["branches"])
    inner = sum(_count(jaxpr, loop_trips) for jaxpr in _inner(params))
    if name == "scan":
        return inner * params["length"]
    return inner * loop_trips if name == "while" else inner


def _inner(params: dict[str, Any]) -> list[core.Jaxpr]:
    """Return the programs among an operation's parameters."""
    values = [item for v in params.values() for item in (v if isinstance(v, tuple) else (v,))]
    # In jax 0.12 one class is both, so what is closed must not be counted as open again.
    programs = [v for v in values if isinstance(v, core.ClosedJaxpr | core.Jaxpr)]
    return [v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in programs]


def _dot_flops(left: tuple[int, ...], right: tuple[int, ...], dimensions: tuple) -> float:
    (_, right_contracted), (_, right_batch) = dimensions
    skipped = {*right_contracted, *right_batch}
    rest = math.prod(size for axis, size in enumerate(right) if axis not in skipped)
    return 2.0 * math.prod(left) * rest
