"""Memory of a device: its lack as a UserError with advice, and on a CPU its reuse."""

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import jax

from clover_jax.errors import UserError

# Of glibc's malloc.h, with the largest value that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _MOST_BYTES = -1, -3, 2**31 - 1


@contextlib.contextmanager
def advise_on_memory(task: str, advice: str) -> Iterator[None]:
    """Turn a device's lack of memory to do a task ("decode 8 rows at once") into a UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # Other failures of the runtime have the same type.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"the device has too little memory to {task}; {advice}") from error


def keep_freed_memory() -> None:
    """Let a CPU's process keep the memory that it frees, for its next allocation.

    XLA allocates a program's temporaries at each call. glibc returns large blocks to the system, so
    the next call would wait for fresh pages. Does nothing on other devices and without glibc.
    """
    if jax.default_backend() == "cpu" and platform.libc_ver()[0] == "glibc":
        # Setting either threshold also ends glibc's own changes to both.
        glibc = ctypes.CDLL(None)
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            glibc.mallopt(threshold, _MOST_BYTES)
