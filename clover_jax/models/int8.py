"""Matrices in int8: half the bytes of bfloat16 to read, the same products.

Only what is stored is quantized. Each output channel has a step of its own (symmetric, the largest
entry is 127 steps), entries are widened where a product reads them, the sum is taken in float32 and
multiplied by the step: matrix ~ values * step.
"""

from __future__ import annotations

from typing import TypeAlias

import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int

LARGEST = 127  # -128 is left out, so that a matrix and its negative round alike


class Int8Matrix(struct.PyTreeNode):
    """A quantized matrix, which takes a matrix's place in params and in products.

    values: int8, in the matrix's shape. (First: flax checks the shape of a param's first leaf.)
    step: float32, of the same rank, 1 along the axes that products sum over.
    """

    values: Int[Array, "..."]
    step: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: int | slice) -> Int8Matrix:
        """Return a part along the first axis."""
        # Where products sum over the first axis, its parts share one step.
        is_shared = self.step.shape[0] == 1 < self.shape[0]
        part = 0 if isinstance(index, int) else slice(None)
        return Int8Matrix(self.values[index], self.step[part if is_shared else index])

    def reshape(self, *shape: int) -> Int8Matrix:
        """Return [inputs, outputs], where the axes to sum over come first."""
        return Int8Matrix(self.values.reshape(shape), self.step.reshape(1, -1))

    def __rmatmul__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        """Return x @ matrix, for a matrix [I, O]."""
        return contract("...i,io->...o", x, self)


Matrix: TypeAlias = Array | Int8Matrix


def quantize(matrix: Float[Array, "..."], inputs: tuple[int, ...]) -> Int8Matrix:
    """Round a matrix to the nearest of 255 values for each output channel.

    inputs: the axes that products sum over; each index of the others has its own step.
    """
    # One step per output channel, so that a product is scaled once, after its sum.
    wide = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=inputs, keepdims=True)
    # Where all weights of an output are 0, any step but 0 will do.
    step = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Int8Matrix(jnp.round(wide / step).astype(jnp.int8), step)


def contract(
    spec: str, x: Float[Array, "..."], matrix: Matrix, dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """Return jnp.einsum(spec, x, matrix).

    dtype: of the result, and of the sums of a matrix that is not quantized; by default that of x.
    """
    if not isinstance(matrix, Int8Matrix):
        return jnp.einsum(spec, x, matrix, preferred_element_type=dtype)
    product = jnp.einsum(spec, x, matrix.values.astype(x.dtype), preferred_element_type=jnp.float32)

    # The step has the matrix's letters; bring it to the letters of the result.
    operands, result = spec.split("->")
    letters = operands.split(",")[1]
    sizes = dict(zip(letters, matrix.step.shape, strict=True))
    outputs = [letter for letter in result if letter in letters]
    summed = [letter for letter in letters if letter not in result]
    step = matrix.step.transpose([letters.index(letter) for letter in outputs + summed])
    # 1 along axes that are x's own; those in front are broadcast.
    step = step.reshape([sizes.get(letter, 1) for letter in result.removeprefix("...")])
    return (product * step).astype(dtype or x.dtype)


def take_rows(matrix: Matrix, ids: Int[Array, "*b"]) -> Matrix:
    """Return rows of a matrix over the vocabulary, [*b, D], as it is stored."""

    def take(part: Array) -> Array:
        # For a single row a TPU makes a slice, for which it would re-lay the whole int8 matrix.
        flat = jnp.broadcast_to(ids.reshape(-1), (2,)) if ids.size == 1 else ids.reshape(-1)
        rows = jnp.take(part, flat, axis=0, mode="clip")[: ids.size]
        return rows.reshape(*ids.shape, part.shape[-1])

    if isinstance(matrix, Int8Matrix):
        return Int8Matrix(take(matrix.values), take(matrix.step))
    return jnp.take(matrix, ids, axis=0, mode="clip")


def widen(matrix: Matrix, dtype: jnp.dtype) -> Array:
    """Return a quantized matrix as an array of `dtype`, and an array unchanged."""
    if not isinstance(matrix, Int8Matrix):
        return matrix
    return (matrix.values * matrix.step).astype(dtype)
