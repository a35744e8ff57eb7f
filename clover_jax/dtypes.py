"""The dtype that a command computes in."""

import jax
import jax.numpy as jnp


def resolve_dtype(name: str) -> jnp.dtype:
    """Return the dtype that `--dtype` names; auto is float32 on CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)
