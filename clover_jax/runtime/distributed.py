"""Several processes, on one machine or many, that work as one run.

Each process starts the same command. Where they find each other stands in the environment, which
`launch/local_processes` or a cluster's starter sets: JAX_COORDINATOR_ADDRESS (HOST:PORT of process
0), JAX_NUM_PROCESSES and JAX_PROCESS_ID; a coordinator "auto" asks the cluster (SLURM, Cloud TPU,
GKE) for all three. All processes run the same programs in the same order; files and output are
process 0's, the primary's, affair.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np

from clover_jax.array_types import Array, PyTree
from clover_jax.errors import UserError, reason_of

COORDINATOR, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
STATUS_LOST = 3  # another process has gone away: start all again
# What the backends say when another process has gone away.
_LOST = ("gloo", "connection closed", "connection reset", "coordination service", "heartbeat")


@contextlib.contextmanager
def joined_processes() -> Iterator[None]:
    """Join the other processes that the environment names; alone where it names none.

    Where another process ends before this one, says so and ends with STATUS_LOST. Raises UserError
    for an incomplete environment.
    """
    # Without it this is one process, whatever else the environment says.
    coordinator = os.environ.get(COORDINATOR)
    if coordinator is None:
        yield
        return
    if coordinator == "auto":
        os.environ.pop(COORDINATOR)  # JAX would take it for an address
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise UserError(
                f"{COORDINATOR}=auto, but nothing here says which cluster this is ({error}); give "
                f"HOST:PORT, {COUNT} and {NUMBER}, or unset it to run alone"
            ) from error
    else:
        count, number = _whole_number(COUNT), _whole_number(NUMBER)
        if not 0 <= number < count:
            raise UserError(f"{NUMBER}={number} must lie between 0 and {COUNT} - 1 = {count - 1}")
        jax.distributed.initialize(coordinator, count, number)

    try:
        yield
    except UserError:
        raise  # whatever its text quotes, no process is gone
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(word in str(error).lower() for word in _LOST):
            raise
        reason = reason_of(error)[:200]
        print(
            f"process {jax.process_index()}: another process of this run has ended, so this one "
            f"cannot go on ({reason}); start all of them again, they go on from the last "
            "checkpoint",
            file=sys.stderr,
            flush=True,
        )
        # JAX's own end would wait for the process that is gone.
        os._exit(STATUS_LOST)


def _whole_number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{COORDINATOR}={os.environ[COORDINATOR]} needs {name}, a whole number, beside it, "
            f"found {text!r}; launch/local_processes sets all three"
        )
    return int(text)


def is_primary() -> bool:
    """Return whether this process writes files and output."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Return when every process has come to this point."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def to_host(values: PyTree) -> PyTree:
    """Bring arrays to the host, whole; every process calls it, and each gets all of them."""

    def bring(array: Array) -> np.ndarray:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return np.asarray(array)
        # Each process has a whole copy: nothing needs to be sent.
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(bring, values)


class AgreedEvent(threading.Event):
    """An event that is set in all processes at the same step, once it is set in one.

    Asking the others means waiting for the device, so that is done once in `every` questions.
    """

    def __init__(self, event: threading.Event, every: int = 8):
        """Watch this process's event; every process must ask equally often."""
        super().__init__()
        self._event, self._every, self._asked = event, every, 0

    def is_set(self) -> bool:
        """Return whether the processes have agreed that it is set."""
        # All have asked equally often, so all of them join in this exchange.
        if not super().is_set() and self._asked % self._every == 0:
            from jax.experimental import multihost_utils

            if np.any(multihost_utils.process_allgather(np.array(self._event.is_set()))):
                self.set()
        self._asked += 1
        # Our own event says nothing here: the others may not know of it yet.
        return super().is_set()


def agreed(event: threading.Event) -> threading.Event:
    """Return an event that all processes see at once; alone, the very event."""
    return AgreedEvent(event) if jax.process_count() > 1 else event
