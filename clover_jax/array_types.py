"""The axis letters, the array aliases that use them, and the `typed` decorator.

These letters are for shapes of arrays. `models/param_layouts.py` has an alphabet of its own, for
the dimensions of parameters, in which E, F and R mean other things.

B batch, S sequence (cache) length, T tree slots including the root, A = depth + 1 slots of an
accepted path, P trained draft positions, W beam width, D model width, F features read by a
drafter, N query heads, K key/value heads, G = N / K query heads per key/value head, H head
width, V vocabulary, Vd that of a head, L layers, E end-of-sequence ids, R rows of any axes,
flattened, I and O inputs and outputs of a matrix. Users see drafted nodes: T - 1.

A small letter is a size of one module, which says what it is: d is mostly a tree's depth, n a
number of whatever the array holds, k of the best ones; *b are any axes in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Bool, Float, Int, PyTree, jaxtyped

Array = jax.Array
Params = PyTree[Any]
LeafPath = tuple[str, ...]  # the names that lead to a leaf of params
# Places a leaf by its path; the leaf is a StoredLeaf, or an array on the host or a device.
Place = Callable[[LeafPath, Any], Array]
FLOAT32 = jnp.dtype("float32")  # jnp.float32 itself is a scalar type

# Modules import jaxtyping's names from here as well.
__all__ = [
    "FLOAT32",
    "Array",
    "Bool",
    "Float",
    "Int",
    "LeafPath",
    "Params",
    "Place",
    "PyTree",
    "typed",
]


def typed(function):
    """Check the annotated shapes and dtypes of `function` at each call (at trace time in jit)."""
    return jaxtyped(typechecker=beartype)(function)
