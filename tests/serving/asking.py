"""Requests over HTTP, and what their answers must be whatever is in them."""

import asyncio
import contextlib
import json
import socket

import httpx2

from clover_jax.checkpoints.sources import find_directory
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.decoding.requests import Generation
from clover_jax.decoding.row_state import Piece, Turn, TurnProgress
from clover_jax.decoding.spec import ModelSpec
from clover_jax.serving.app import make_app
from clover_jax.serving.options import ServeOptions
from clover_jax.serving.requests import Served
from clover_jax.serving.service import Ready, Service
from clover_jax.serving.token_texts import TokenTexts
from tests.serving.conftest import AREA, KEY, events_of, path_of, text_of

JSON = {"Content-Type": "application/json"}
GREEDY = {"prompt": AREA, "max_tokens": 24, "temperature": 0}


def whole(client, body):
    """Return the body of an answer."""
    response = client.post(path_of(body), json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text(client, body):
    (choice,) = whole(client, body)["choices"]
    return text_of(choice)


def streamed(client, body):
    """Return the chunks of an answer."""
    with client.stream("POST", path_of(body), json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response)


def said(choices):
    """Return the text of choices or of pieces, and the names and arguments of their calls."""
    told = []
    for choice in choices:
        told.append(text_of(choice))
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ():
            told += call["function"].get("name", ""), call["function"]["arguments"]
    return "".join(told)


WAYS = ["whole", "stream", "stream", "whole", "leave"]  # a fifth goes away in the middle


def ask(client, body, way):
    """Return what is said to a client that asks in one of WAYS; None where it goes away."""
    if way == "whole":
        return said(whole(client, body)["choices"])
    if way == "stream":
        return said(choice for chunk in streamed(client, body) for choice in chunk["choices"])
    body = body | {"stream": True}
    with client.stream("POST", path_of(body), json=body) as response:
        next(response.iter_lines())
    return None


def refused(response, status, param=None):
    """Return the message of a refusal, which must be in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return error["message"]


def ask_app(method, path, headers=None, **options):
    """Return what a server without models answers."""

    async def asked():
        app = make_app(Service(ServeOptions(ModelSpec(), **options)))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(asked())


@contextlib.contextmanager
def endless(client, **changes):
    """Yield the lines of an answer that goes on for long, once it has begun."""
    body = {"prompt": AREA, "max_tokens": 480, "ignore_eos": True, "stream": True} | changes
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield lines


@contextlib.contextmanager
def unread(server, body):
    """Yield after asking for a whole answer that nobody will read."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(server.address) as connection:
        connection.sendall(head.encode() + content)
        yield


class Scripted:
    """A scheduler that answers every ask with the same text, in pieces of a size.

    waits: for what, before the first piece.
    """

    def __init__(self, text, size, reason="eos", waits=None):
        self._text, self._size, self._reason, self._waits = text, size, reason, waits
        self.has_failed, self.asks = False, []

    async def submit(self, ask):
        self.asks.append(ask)
        return self._updates(ask)

    async def _updates(self, ask):
        if self._waits is not None:
            await self._waits.wait()
        generation = Generation(0, [1], accepted=[0])
        pieces = [self._text[at : at + self._size] for at in range(0, len(self._text), self._size)]
        for number, piece in enumerate(pieces, 1):
            generation.output_ids.append(number)
            ended = number == len(pieces)
            reason, whole = (self._reason, self._text) if ended else (None, None)
            turn = Turn([1], list(generation.output_ids), whole, [], 1, 1.0, 0.1, reason)
            shown = [Piece(number, [number], piece)] if ask.watched_by else []
            yield TurnProgress(turn, generation, shown, ended, 0)

    def seconds_since(self, start):
        return 0.1

    def compile_seconds(self, start):
        return 0.0


def scripted_app(scheduler, style):
    """Return the application of a server with a `Scripted` scheduler."""
    service = Service(ServeOptions(ModelSpec()))
    served = Served("tiny", 512, 16, style=style)
    texts = TokenTexts(load_tokenizer(find_directory("builtin:tiny")))
    service.open(Ready(None, served, texts, scheduler, {}))
    return make_app(service)
