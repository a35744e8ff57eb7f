"""Connections to clients that may be slow or broken: limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from clover_jax.serving.body import ApiError

HEAD_SECONDS = 30.0  # for the head of a request to arrive


class Protocol(H11Protocol):
    """uvicorn's protocol; it closes a connection whose next request does not begin in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()

    def _watch_head(self) -> None:
        # Between two requests uvicorn has its own limit, which the first byte ends.
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of this request is complete; body and answer have limits of their own.
            self._forget_head()
        elif self._head_timer is None:
            # Later bytes do not restart the timer: slow ones would hold the connection.
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the form of all other refusals."""
        # After the beginning of another answer there is no place for this one.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(msg).body()).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for part in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
