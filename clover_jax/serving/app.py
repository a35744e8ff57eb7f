"""The routes of the server, as a Starlette application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

import clover_jax
from clover_jax.data.chat import encode_prompt
from clover_jax.errors import UserError
from clover_jax.serving.answering import Answering, as_api_error
from clover_jax.serving.body import RETRY, ApiError, read_object
from clover_jax.serving.requests import (
    Call,
    Served,
    check_model,
    conversation_prompt,
    read_chat,
    read_completion,
)
from clover_jax.serving.responses_api import read_response
from clover_jax.serving.service import Service
from clover_jax.serving.shapes import DetokenizeRequest, TokenizeRequest, validated

PAGE = Path(clover_jax.__file__).parent / "assets" / "page" / "index.html"
_PAGE_HEADERS = {
    # All that the page needs is in the file; nothing may be loaded from elsewhere.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# The version of the text format in which prometheus_client writes.
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From a body, what it is checked against and the client's address, to the call.
Read = Callable[[Mapping[str, Any], Served, str], Call]


def make_app(service: Service) -> Starlette:
    """Return the application that answers for a service."""

    async def health(request: Request) -> Response:
        scheduler = service.ready().scheduler
        if not scheduler.compiled.done():
            counts = f"{scheduler.num_compiled} of {scheduler.num_programs} programs are ready"
            message = f"compiling, {counts}; requests are answered, but may wait"
            raise ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, headers=RETRY)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        # Open to all, also while the model loads: collectors of figures have no key.
        return Response(service.metrics.text(), headers={"Content-Type": _METRICS_TYPE})

    async def page(request: Request) -> Response:
        return FileResponse(PAGE, headers=_PAGE_HEADERS)

    routes = [
        Route("/v1/completions", _answers(read_completion), methods=["POST"]),
        Route("/v1/chat/completions", _answers(read_chat), methods=["POST"]),
        Route("/v1/responses", _answers(read_response), methods=["POST"]),
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    if service.options.page:
        routes.append(Route("/", page))

    # No page of another origin may call the server unless its user has said so.
    origins = service.options.allowed_origins
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's client sends a dozen of its own
    )
    app = Starlette(
        routes=routes,
        middleware=[cors] if origins else [],
        # Any other exception is a bug: starlette raises it again, and uvicorn logs it.
        exception_handlers=dict.fromkeys((HTTPException, ApiError, UserError, Exception), _refuse),
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


async def _body(request: Request) -> dict[str, Any]:
    return await read_object(request, _service(request).options.max_body_bytes)


def _answers(read: Read) -> Callable[[Request], Any]:
    """Return the endpoint of bodies that `read` checks."""

    async def endpoint(request: Request) -> Response:
        service = _service(request)
        service.admit(request)  # before the body, which may be long
        body = await _body(request)
        peer = request.client.host if request.client else ""
        ready = service.ready()  # it may have begun to stop meanwhile
        return Answering(service, ready, read(body, ready.served, peer))

    return endpoint


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(request)]})


async def _model(request: Request) -> Response:
    card = _card(request)
    check_model(request.path_params["name"], card["id"])
    return JSONResponse(card)


def _card(request: Request) -> dict[str, Any]:
    service = _service(request)
    ready = service.admit(request)
    return {
        "id": ready.served.model,
        "object": "model",
        "created": service.created,
        "owned_by": "clover_jax",
        "root": service.options.spec.base,
        "parent": None,
        "max_model_len": ready.served.max_model_len,
        # Ours: how it drafts, and what else it may be asked to draft with.
        "draft": service.options.spec.draft,
        "tree": ready.models.tree.name,
        "other_drafts": list(ready.others),
    }


async def _tokenize(request: Request) -> Response:
    ready = _service(request).admit(request)
    asked = validated(TokenizeRequest, await _body(request))
    check_model(asked.model, ready.served.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError("give one of prompt and messages", param="prompt")

    # In a thread: a long text takes its time, and others wait for events meanwhile.
    if asked.messages is not None:
        prompt = conversation_prompt(asked, asked.messages, ready.served)
        vocab_size = ready.models.base.config.vocab_size
        ids = await asyncio.to_thread(encode_prompt, prompt, ready.models.tokenizer, vocab_size)
    else:
        special = asked.add_special_tokens is not False
        ids = await asyncio.to_thread(ready.texts.encode, asked.prompt or "", special)
    names = [ready.texts.written(id_) for id_ in ids] if asked.return_token_strs else None
    counts = {"count": len(ids), "max_model_len": ready.served.max_model_len}
    return JSONResponse(counts | {"tokens": ids, "token_strs": names})


async def _detokenize(request: Request) -> Response:
    ready = _service(request).admit(request)
    asked = validated(DetokenizeRequest, await _body(request))
    check_model(asked.model, ready.served.model)
    vocab_size, largest = ready.models.base.config.vocab_size, max(asked.tokens, default=0)
    # The tokenizer would silently leave out ids that it does not know.
    if largest >= vocab_size:
        raise ApiError(f"tokens must lie in 0 .. {vocab_size - 1}, not {largest}", param="tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(ready.texts.decode, asked.tokens)})


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # another path or method
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase}"
        error = ApiError(message, error.status_code, headers=error.headers)
    refusal = as_api_error(error)
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)
