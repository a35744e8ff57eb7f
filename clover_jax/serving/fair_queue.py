"""A queue that is fair between clients."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """Jobs that wait: one of each client in turn, however many it has."""

    def __init__(self):
        # Clients in the order of their turns; a client without jobs has no entry.
        self._jobs: collections.OrderedDict[str, collections.deque[Job]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain.from_iterable(self._jobs.values())

    def push(self, client: str, job: Job) -> None:
        """Add a job after the others of its client."""
        self._jobs.setdefault(client, collections.deque()).append(job)

    def pop(self) -> Job:
        """Take the first job of the client whose turn it is."""
        client, jobs = self._jobs.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._jobs[client] = jobs  # after all other clients
        return job

    def discard(self, client: str, job: Job) -> None:
        """Remove a job if it waits."""
        jobs = self._jobs.get(client)
        if jobs and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._jobs[client]
