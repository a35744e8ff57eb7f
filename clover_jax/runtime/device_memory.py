"""A device's lack of memory as a UserError with advice."""

import contextlib
from collections.abc import Iterator

import jax

from clover_jax.errors import UserError


@contextlib.contextmanager
def advise_on_memory(task: str, advice: str) -> Iterator[None]:
    """Turn a device's lack of memory into a UserError.

    Example: "decode 8 rows at once" and "give a smaller --batch_size".
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # Other failures of the runtime have the same type.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device has too little memory to {task}; {advice}") from error
