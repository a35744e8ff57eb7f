"""Where a decode's arrays lie: on one device, or split over a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from clover_jax.array_types import Array, PyTree
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.step import Weights
from clover_jax.sharding.meshes import shape_of
from clover_jax.sharding.placement import (
    decode_state_shardings,
    param_shardings,
    put_whole,
    replicated,
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an engine; mesh: None for a single one."""

    mesh: Mesh | None

    def whole_rows(self, batch_size: int) -> int:
        """Return the least number of rows, `batch_size` or more, that all devices can share."""
        # Rounded up: rows that cannot be split evenly would all lie on every device.
        shards = shape_of(self.mesh).num_row_shards
        return -(-batch_size // shards) * shards

    def array(self, value: Any, dtype: DTypeLike | None = None) -> Array:
        """Put a host's value on the device, or whole on every device of the mesh."""
        if self.mesh is None:
            return jnp.array(value, dtype)
        return put_whole(np.asarray(value, dtype), self.mesh)

    def weights(self, weights: Weights) -> Weights:
        """Split weights over the mesh; those that lie there already stay."""
        if self.mesh is None:
            return weights
        return jax.device_put(weights, param_shardings(weights, self.mesh))

    def state(self, state: DecodeState) -> DecodeState:
        if self.mesh is None:
            return state
        return jax.device_put(state, decode_state_shardings(state, self.mesh))

    def in_use(self) -> contextlib.AbstractContextManager:
        """Return the context in which programs know the mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def compiled(self, function: Callable, **options: Any) -> Callable:
        """Return a compiled function of states; on a mesh its result lies as states do there."""
        mesh = self.mesh
        if mesh is None:
            return jax.jit(function, **options)

        def placed(*arguments: Any) -> Any:
            # XLA may choose another layout for a result; the next call would then copy the caches.
            result = function(*arguments)
            # The state comes first where a program returns more than that.
            states, *records = result if isinstance(result, tuple) else (result,)
            there = decode_state_shardings(states, mesh)
            states = jax.lax.with_sharding_constraint(states, there)
            return (states, *records) if records else states

        compiled = jax.jit(placed, **options)

        def call(*arguments: Any) -> Any:
            # A call may trace the function, which looks up the mesh in use.
            with self.in_use():
                return compiled(*arguments)

        return call

    def whole(self, arrays: PyTree) -> PyTree:
        """Within a program: replicate small arrays on every device, for each host to read."""
        if self.mesh is None:
            return arrays
        return jax.lax.with_sharding_constraint(arrays, replicated(self.mesh))

    def copies(self, arrays: PyTree) -> PyTree:
        """Copy arrays of a state that the next program consumes, replicated for every host."""
        return _copies(self.mesh)(arrays)

    def read(self, arrays: PyTree) -> PyTree:
        """Bring arrays to this host, also those on the devices of other hosts."""
        return jax.device_get(self.copies(arrays))


@functools.cache  # or every chunk of steps would compile it anew
def _copies(mesh: Mesh | None) -> Callable[[PyTree], PyTree]:
    def copies(arrays: PyTree) -> PyTree:
        return jax.tree.map(jnp.copy, arrays)

    return jax.jit(copies, out_shardings=None if mesh is None else replicated(mesh))
