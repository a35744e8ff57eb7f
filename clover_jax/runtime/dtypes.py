"""The dtype that a command computes in, and exact float32 matmuls."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from clover_jax.errors import UserError


def resolve_dtype(name: str) -> jnp.dtype:
    """Return the dtype that `--dtype` names; auto is float32 on CPU and bfloat16 elsewhere."""
    # Not every caller's settings have been checked.
    if name not in ("auto", "float32", "bfloat16"):
        raise UserError(f"dtype {name!r} is unknown; use auto, float32 or bfloat16")
    # bfloat16 is not faster on most CPUs.
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


@contextlib.contextmanager
def exact_matmuls(dtype: str) -> Iterator[None]:
    """Return a context in which float32 means float32, on accelerators and under x64 too."""
    # By default accelerators multiply float32 with fewer bits. With jax_enable_x64 plain numbers
    # and indices would have 64 bits.
    highest = jax.default_matmul_precision("highest")
    with jax.enable_x64(False), highest if dtype == "float32" else contextlib.nullcontext():
        yield
