"""One server's state: models, admission of requests, and the way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

from starlette.requests import Request

from clover_jax.decoding.models import Models
from clover_jax.decoding.spec import NO_DRAFT
from clover_jax.serving.body import RETRY, ApiError
from clover_jax.serving.metrics import Metrics
from clover_jax.serving.options import ServeOptions
from clover_jax.serving.requests import Served
from clover_jax.serving.scheduler import Scheduler
from clover_jax.serving.token_texts import TokenTexts


class Ready(NamedTuple):
    """The loaded models and their schedulers.

    others: schedulers with other drafts, by name, to compare with.
    """

    models: Models
    served: Served
    texts: TokenTexts
    scheduler: Scheduler
    others: Mapping[str, Scheduler]

    @property
    def schedulers(self) -> list[Scheduler]:
        return [self.scheduler, *self.others.values()]

    def scheduler_with(self, draft: str | None) -> Scheduler:
        """Return the scheduler of a draft; None is the server's own.

        Raises ApiError for one that is not offered.
        """
        if draft is None:
            return self.scheduler
        if draft not in self.others:
            offered = ", ".join(self.others) or "nothing"
            raise ApiError(
                f"in addition to its own draft this server offers {offered}, not {draft!r}",
                param="draft",
            )
        return self.others[draft]


class Service:
    """State shared by all requests; it admits them, counts them, and drains.

    created: when it began, in seconds since 1970.
    is_needed: set when requests are answered at once, or one is: a signal then ends it in order.
    """

    def __init__(self, options: ServeOptions):
        """Begin without models; raises UserError for keys that cannot be."""
        self.options, self.created = options, int(time.time())
        self.metrics = Metrics(options.model_name, options.spec.draft != NO_DRAFT)
        self._keys = [hashlib.sha256(key.encode()).digest() for key in options.api_keys()]
        self._ready: Ready | None = None
        self.is_needed = asyncio.Event()
        # Requests that are being answered: `drain` waits until there are none.
        self._is_draining, self._num_open = False, 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    def open(self, ready: Ready) -> None:
        """Admit requests from now on; some may wait until a program is compiled."""
        self._ready = ready
        # Figures are asked for whenever they are wanted.
        running, waiting = self.metrics.running, self.metrics.waiting
        running.set_function(lambda: sum(each.num_running for each in ready.schedulers))
        waiting.set_function(lambda: sum(each.num_waiting for each in ready.schedulers))
        self.metrics.grammars = lambda: [each.grammar_counts for each in ready.schedulers]

    @property
    def needs_key(self) -> bool:
        return bool(self._keys)

    def admit(self, request: Request) -> Ready:
        """Admit a request; raises ApiError for a foreign page or key, and where nothing can answer.

        A page elsewhere may have pointed its own name at this machine.
        """
        # A browser always sends the host name that it used.
        name = re.sub(r":\d+$", "", request.headers.get("host", "localhost"))
        # A key is protection enough, and an address in the network may be reached by any name.
        is_open = self.needs_key or not is_loopback(self.options.host)
        is_known = name.lower() in map(str.lower, self.options.allowed_hosts)
        if not (is_open or is_known or is_loopback(name.strip("[]"))):
            raise ApiError(
                f"without --api_key, a server at {self.options.host} answers to localhost only, "
                f"and the request is for {name!r}: start it with --allowed_hosts={name}",
                HTTPStatus.FORBIDDEN,
                param="Host",
            )

        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # Digests have one length, and all are compared, so the time does not depend on the key.
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if self.needs_key and not (kind.lower() == "bearer" and any(matches)):
            raise ApiError(
                "missing or invalid API key: send Authorization: Bearer KEY",
                HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self.ready()

    def ready(self) -> Ready:
        """Return what is loaded.

        Raises ApiError while it loads, once the server ends, and once its engine has failed.
        """
        if self._ready is None or self._is_draining:
            loading = f"loading {self.options.spec.base}"
            reason = "the server is stopping" if self._is_draining else loading
        elif self._ready.scheduler.has_failed:
            reason = "the server has failed; its log says why"
        else:
            return self._ready
        raise ApiError(reason, HTTPStatus.SERVICE_UNAVAILABLE, headers=RETRY)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request that will be answered, even if the server is stopped meanwhile."""
        self._num_open += 1
        self.is_needed.set()
        self._all_answered.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._all_answered.set()

    async def drain(self) -> None:
        """Refuse new requests, and wait until all admitted ones are answered."""
        # New requests are refused first: none may begin while the last ones are waited for.
        self._is_draining = True
        await self._all_answered.wait()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    # Any other host name may lead anywhere.
    except ValueError:
        return False
