"""Options of the compiler for decoding programs."""

from __future__ import annotations

import functools

import jax

Options = dict[str, bool | int | str]

# A product of one row with a matrix (batch 1: plain decoding, the first draft levels) is otherwise
# turned into multiplications and sums on the vector unit: 3.4 times the time of reading the matrix,
# by the compiler's own estimate for a v6e and lm_head of Llama 3.
#
# Over a mesh, a large product with a gathered operand is otherwise cut into windows that overlap
# with sending. A decode step gathers a few rows only, and the windows are of its weights: lm_head
# is laid out anew at every step.
_TPU: Options = {
    "xla_tpu_enable_dot_strength_reduction": False,
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
}


def options_for(platform: str) -> Options | None:
    """Return the options of decoding programs for "cpu", "gpu", "cuda" or "tpu"."""
    return dict(_TPU) if platform == "tpu" else None


@functools.cache
def options_here() -> Options | None:
    """Return the options for the default device; None where its compiler does not know them."""
    options = options_for(jax.default_backend())
    if options is None:
        return None
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # another release of the compiler: slower, not wrong
        return None
    return options
