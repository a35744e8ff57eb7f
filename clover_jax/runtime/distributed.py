"""Several processes, on one machine or many, that work as one run.

Each process starts the same command. The environment says where they find each other; it is set by
`launch/local_processes` or a cluster's launcher: JAX_COORDINATOR_ADDRESS (HOST:PORT of process
0), JAX_NUM_PROCESSES and JAX_PROCESS_ID; a coordinator "auto" asks the cluster (SLURM, Cloud TPU,
GKE) for all three. All processes run the same programs in the same order; only process 0, the
primary, writes files and output.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from clover_jax.array_types import Array, PyTree
from clover_jax.errors import UserError, reason_of

COORDINATOR, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
STATUS_LOST = 3  # another process has ended: start all again
# Seconds of silence after which a process counts as lost; that a finished process waits for the
# others, since the primary may have more to do; that a failed process waits for them.
_SILENCE, _PATIENCE, _FAREWELL = 30, 7 * 24 * 3600, 20
_EVERY = 8  # steps between two exchanges about a request to stop
# Words in the backends' messages about a lost process.
_LOST = ("gloo", "connection closed", "connection reset", "coordination service", "heartbeat")

T = TypeVar("T")


@contextlib.contextmanager
def joined_processes() -> Iterator[None]:
    """Join the processes that the environment names, if it names any.

    When another process is lost, this one reports it and ends with STATUS_LOST. When this one alone
    fails, it ends soon, so that the others notice. Raises UserError for an incomplete environment.
    """
    coordinator = os.environ.get(COORDINATOR)
    if coordinator is None:
        yield
        return
    join = functools.partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=_SILENCE,
        shutdown_timeout_seconds=_PATIENCE,
    )
    if coordinator == "auto":
        os.environ.pop(COORDINATOR)  # JAX would take it for an address
        try:
            join()
        except ValueError as error:
            raise UserError(
                f"{COORDINATOR}=auto, but no cluster was recognized ({error}); give HOST:PORT, "
                f"{COUNT} and {NUMBER}, or unset it to run one process"
            ) from error
    else:
        count, number = _whole_number(COUNT), _whole_number(NUMBER)
        if not 0 <= number < count:
            raise UserError(f"{NUMBER}={number} must lie between 0 and {COUNT} - 1 = {count - 1}")
        join(coordinator, count, number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX only records it, and nothing reads that

    try:
        yield
    except BaseException as error:
        # A UserError may quote such words, but is never about a lost process.
        of_backend = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
        is_mistake = isinstance(error, UserError)
        if of_backend and not is_mistake and any(word in str(error).lower() for word in _LOST):
            print(
                f"process {jax.process_index()}: another process of this run has ended, so this "
                f"one cannot continue ({reason_of(error)[:200]}); start all again to resume",
                file=sys.stderr,
                flush=True,
            )
            # JAX's shutdown would wait for the lost process.
            os._exit(STATUS_LOST)

        # JAX's shutdown waits for the others, which wait for this one in the next step. If all have
        # found the same mistake, they shut down in time.
        leaving = threading.Timer(_FAREWELL, os._exit, [1])
        leaving.daemon = True
        leaving.start()
        raise


def _whole_number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{COORDINATOR}={os.environ[COORDINATOR]} also needs {name}, a whole number, not "
            f"{text!r}; launch/local_processes sets all three"
        )
    return int(text)


def process_count() -> int:
    """Return how many processes work as one; a single process touches no device for it."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_primary() -> bool:
    """Return whether this process writes files and output; a single one touches no device."""
    return process_count() == 1 or jax.process_index() == 0


def from_primary(make: Callable[[], T]) -> T:
    """Return the primary's result of `make` in every process; all of them call this.

    For results that depend on a clock, a terminal, or a file that the others may not see. UserError
    and OSError are raised in every process.
    """
    if process_count() == 1:
        return make()
    sent = b""
    if is_primary():
        try:
            sent = pickle.dumps((make(), None))
        except (UserError, OSError) as error:
            sent = pickle.dumps((None, error))

    # The size first, since all processes must pass arrays of one shape.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
    mine = np.frombuffer(sent.ljust(size, b"\0"), np.uint8)
    result, mistake = pickle.loads(multihost_utils.broadcast_one_to_all(mine).tobytes())
    if mistake is not None:
        raise mistake
    return result


@contextlib.contextmanager
def primary_speaks() -> Iterator[None]:
    """Suppress the output of all processes but the primary; exceptions pass."""
    if is_primary():
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def wait_for_all(name: str) -> None:
    """Return when every process has reached this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def to_host(values: PyTree) -> PyTree:
    """Return whole arrays on the host, the same in every process; all processes call this."""

    def bring(array: Array) -> np.ndarray:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return np.asarray(array)
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(bring, values)


class AgreedEvent(threading.Event):
    """An event that is set in all processes at the same step after it is set in one.

    An exchange waits for the device, so only every `_EVERY`-th `is_set` makes one.
    """

    def __init__(self, event: threading.Event):
        """Watch this process's event; every process must call `is_set` equally often."""
        super().__init__()
        self._event, self._asked = event, 0

    def is_set(self) -> bool:
        """Return whether the processes have agreed that it is set."""
        # All processes have asked equally often, so all of them take part.
        if not super().is_set() and self._asked % _EVERY == 0:
            asked_to_stop = multihost_utils.process_allgather(np.array(self._event.is_set()))
            if asked_to_stop.any():
                self.set()
        self._asked += 1
        # Not the event of this process: the others may not know it yet.
        return super().is_set()


def agreed(event: threading.Event) -> threading.Event:
    """Return an event that all processes see at the same step."""
    return AgreedEvent(event) if jax.process_count() > 1 else event
