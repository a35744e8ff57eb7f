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
STATUS_LOST = 3  # another process is lost: start all again
# Seconds: of silence, after which a process counts as gone; that one that is done waits for the
# others, as the primary may have more to do; that one that fails waits for them.
_SILENCE, _PATIENCE, _FAREWELL = 30, 7 * 24 * 3600, 20
_EVERY = 8  # steps between two questions whether a process is asked to stop
# Messages of the backends when another process is lost.
_LOST = ("gloo", "connection closed", "connection reset", "coordination service", "heartbeat")

T = TypeVar("T")


@contextlib.contextmanager
def joined_processes() -> Iterator[None]:
    """Join the other processes that the environment names; alone where it names none.

    When another process is lost, this one reports it and ends with STATUS_LOST. When this one alone
    fails, it ends soon, so that the others notice. Raises UserError for an incomplete environment.
    """
    # Without it this is one process, whatever else the environment says.
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
                f"{COORDINATOR}=auto, but nothing here says which cluster this is ({error}); give "
                f"HOST:PORT, {COUNT} and {NUMBER}, or unset it to run alone"
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
        if _tells_of_a_loss(error):
            print(
                f"process {jax.process_index()}: another process of this run has ended, so this "
                f"one cannot go on ({reason_of(error)[:200]}); start all of them again, they go on "
                "where they were",
                file=sys.stderr,
                flush=True,
            )
            # JAX's own end would wait for the process that is gone.
            os._exit(STATUS_LOST)

        # JAX's own end waits for the others, which wait for this one in the next step. A mistake
        # that all have found brings them there in time.
        leaving = threading.Timer(_FAREWELL, os._exit, [1])
        leaving.daemon = True
        leaving.start()
        raise


def _tells_of_a_loss(error: BaseException) -> bool:
    # Whatever a UserError quotes, no process is gone.
    of_backend = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    is_mistake = isinstance(error, UserError)
    return of_backend and not is_mistake and any(word in str(error).lower() for word in _LOST)


def _whole_number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{COORDINATOR}={os.environ[COORDINATOR]} needs {name}, a whole number, beside it, "
            f"found {text!r}; launch/local_processes sets all three"
        )
    return int(text)


def process_count() -> int:
    """Return how many processes work as one; touches no device where this is one alone."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_primary() -> bool:
    """Return whether this process writes files and output; touches no device where it is alone."""
    return process_count() == 1 or jax.process_index() == 0


def from_primary(make: Callable[[], T]) -> T:
    """Return the primary's result of `make` in every process; all of them call this.

    For results that depend on a clock, a terminal, or a file that the others may not see. A user's
    mistake there (UserError, OSError) is raised in every process.
    """
    # A single process sends nothing, so that results need not be picklable.
    if process_count() == 1:
        return make()
    sent = b""
    if is_primary():
        try:
            sent = pickle.dumps((make(), None))
        except (UserError, OSError) as error:
            sent = pickle.dumps((None, error))

    # The others learn the size first: all must bring arrays of one shape.
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
    """Return when every process has come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def to_host(values: PyTree) -> PyTree:
    """Bring arrays to the host, whole; every process calls it, and each gets all of them."""

    def bring(array: Array) -> np.ndarray:
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            return np.asarray(array)
        # Each process has a whole copy: nothing needs to be sent.
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(bring, values)


class AgreedEvent(threading.Event):
    """An event that is set in all processes at the same step, once it is set in one.

    To ask the others means to wait for the device, so only every `_EVERY`-th `is_set` asks.
    """

    def __init__(self, event: threading.Event):
        """Watch this process's event; every process must ask equally often."""
        super().__init__()
        self._event, self._asked = event, 0

    def is_set(self) -> bool:
        """Return whether the processes have agreed that it is set."""
        # All have asked equally often, so all of them join in this exchange.
        if not super().is_set() and self._asked % _EVERY == 0:
            asked_to_stop = multihost_utils.process_allgather(np.array(self._event.is_set()))
            if asked_to_stop.any():
                self.set()
        self._asked += 1
        # Not this process's own event: the others may not know of it yet.
        return super().is_set()


def agreed(event: threading.Event) -> threading.Event:
    """Return an event that all processes see at the same step; alone, the event itself."""
    return AgreedEvent(event) if jax.process_count() > 1 else event
