"""From a checked call to its answer, whole or as a stream; a disconnected client ends it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from clover_jax.decoding.row_state import TurnProgress
from clover_jax.errors import UserError
from clover_jax.serving.body import ApiError
from clover_jax.serving.requests import Call
from clover_jax.serving.responses import Answers, ChatAnswers, CompletionAnswers
from clover_jax.serving.responses_api import ResponseAnswers
from clover_jax.serving.service import Ready, Service

WRITE_SECONDS = 60.0  # for a client to take what is written; slower ones are cut off
COMMENT_SECONDS = 15.0  # without an event: proxies and clients cut off streams that are silent
_COMMENT = b": waiting\n\n"  # what server-sent events have for nothing
_EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # proxies of nginx would hold events back
}

Take = Callable[[int, TurnProgress], Awaitable[None]]


class Answering(Response):
    """The response to one call, decoded while it is sent; a client that goes away ends it."""

    def __init__(self, service: Service, ready: Ready, call: Call):
        super().__init__()
        self._service, self._call = service, call
        self._started = time.perf_counter()  # latencies contain tokenizing and waiting
        self._scheduler = ready.scheduler_with(call.draft)
        kind: type[Answers] = ChatAnswers if call.is_chat else CompletionAnswers
        if call.response_of is not None:
            kind = ResponseAnswers
        self._answers = kind(call, ready.served.model, ready.texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Decode and answer; raises ApiError and what the scheduler raises before it has begun."""

        async def whole() -> None:
            async with self._decoding() as updates:
                # Nothing is sent before all is there: a failure still gets its own HTTP status.
                ended = await self._follow_all(updates)
            await JSONResponse(self._answers.whole(ended))(scope, receive, send)

        # Nothing is awaited between the endpoint's `ready` and this: `drain` waits for the request.
        with self._service.answering():
            await _unless_gone(receive, self._stream(send) if self._call.streams else whole())

    async def _stream(self, send: Send) -> None:
        writer = _EventWriter(send, self._answers)

        async def take(index: int, progress: TurnProgress) -> None:
            waited = self._scheduler.compile_seconds(self._started)
            await writer.write(self._answers.next(index, progress, waited))

        # A refusal before anything is decoded still gets its own HTTP status.
        async with self._decoding() as updates:
            headers = Headers(_EVENT_HEADERS).raw
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            comments = asyncio.create_task(writer.comment_while_silent())
            try:
                ended = await self._follow_all(updates, take)
            except _Gone:
                raise
            except Exception as error:
                await writer.write([as_api_error(error).body()], is_last=True)
                if isinstance(error, ApiError | UserError):
                    return
                raise  # a bug: uvicorn logs it
            finally:
                comments.cancel()
        await writer.write(self._answers.last(ended), is_last=True)

    @contextlib.asynccontextmanager
    async def _decoding(self) -> AsyncIterator[Sequence[AsyncIterator[TurnProgress]]]:
        """Yield the updates of every ask; at the end, also after an error, all slots are freed."""
        async with contextlib.AsyncExitStack() as stack:
            # All asks are queued before one is followed; where one is refused, all are withdrawn.
            enter, submit = stack.enter_async_context, self._scheduler.submit
            yield [await enter(contextlib.aclosing(await submit(ask))) for ask in self._call.asks]

    async def _follow_all(
        self, updates: Sequence[AsyncIterator[TurnProgress]], take: Take | None = None
    ) -> list[TurnProgress]:
        """Return the last update of every ask; `take` gets those before it."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._follow(index, update, take))
                    for index, update in enumerate(updates)
                ]
        except BaseExceptionGroup as errors:
            # The first has canceled the others.
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _follow(
        self, index: int, updates: AsyncIterator[TurnProgress], take: Take | None
    ) -> TurnProgress:
        # Latencies leave out compilation, which only the first requests wait for.
        metrics, seconds_since = self._service.metrics, self._scheduler.seconds_since
        last_tokens: float | None = None
        try:
            async for progress in updates:
                # Only streams have pieces; in other answers no client sees the first token arrive.
                if count := sum(len(piece.ids) for piece in progress.pieces):
                    if last_tokens is None:
                        metrics.first_token.observe(seconds_since(self._started))
                    else:
                        metrics.later_tokens(count, seconds_since(last_tokens))
                    last_tokens = time.perf_counter()

                # Before the last bytes: a client that has its answer finds it in the metrics.
                if progress.ended:
                    seconds = seconds_since(self._started)
                    metrics.ended(progress, seconds, self._call.draft is None)
                if take is not None:
                    await take(index, progress)
        except asyncio.CancelledError:
            metrics.aborted()
            raise
        return progress  # the last one: updates stop with the end of the ask


class _EventWriter:
    """Writes server-sent events, all new ones of a choice together."""

    def __init__(self, send: Send, answers: Answers):
        self._answers = answers
        self._send, self._lock, self._num_written = send, asyncio.Lock(), 0

    async def write(self, values: list[dict[str, Any]], is_last: bool = False) -> None:
        """Write an event for each value; after the last ones the line that ends a stream."""
        body = b"".join(map(self._answers.event, values))
        body += self._answers.done if is_last else b""
        # New tokens may settle no text yet, such as the first bytes of a character.
        if body:
            await self._write(body, is_last)

    async def comment_while_silent(self) -> None:
        """Write a comment whenever nothing was written for a while; until it is canceled."""
        with contextlib.suppress(_Gone):  # the next event finds that too
            while True:
                before = self._num_written
                await asyncio.sleep(COMMENT_SECONDS)
                if self._num_written == before:
                    await self._write(_COMMENT)

    async def _write(self, body: bytes, is_last: bool = False) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        self._num_written += 1
        # Choices come side by side, and a client may read slowly, but not for ever.
        async with self._lock:
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._send(message)
            except TimeoutError:
                raise _Gone from None


class _Gone(Exception):
    """The client has disconnected, or does not read its answer."""


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await work, or cancel it when the client goes away."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        # uvicorn drops what is sent to a client that has gone; only a received message tells.
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            with contextlib.suppress(_Gone):
                working.result()
    finally:
        # Also where this request itself is canceled: neither may go on without it.
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def as_api_error(error: Exception) -> ApiError:
    """Return the refusal that a client gets for an error of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        # Messages begin with the place in the body, or with a value that is too large.
        names = r"temperature|(top|min)_p|\w+_penalty|(prompt|messages|logit_bias)[^:]*(?=:)"
        # A row that fails later names its prompt first.
        words = re.sub(r"^(prompt|messages)[^:]*: (?=structured_outputs:)", "", str(error))
        names += "|structured_outputs(?=:)"
        place = re.match(names, words)
        return ApiError(words, param=place and place[0])
    # A bug: its message may quote anything, and is for the log alone.
    return ApiError("the server has failed; its log says why", HTTPStatus.INTERNAL_SERVER_ERROR)
