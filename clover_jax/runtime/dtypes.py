"""The dtype that a command computes in, and exact float32 matmuls."""

import contextlib

import jax
import jax.numpy as jnp

from clover_jax.errors import UserError


def resolve_dtype(name: str) -> jnp.dtype:
    """Return the dtype that `--dtype` names; auto is float32 on CPU and bfloat16 elsewhere.

    Raises UserError for another name.
    """
    # Callers of the library come here too, without the flag's check of choices.
    if name not in ("auto", "float32", "bfloat16"):
        raise UserError(f"dtype {name!r} is unknown; use auto, float32 or bfloat16")
    # On most CPUs bfloat16 gains nothing.
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def exact_matmuls(dtype: str) -> contextlib.AbstractContextManager:
    """Return a context in which float32 means float32, on accelerators too."""
    # By default accelerators multiply float32 in fewer bits.
    if dtype == "float32":
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
