"""Refusals in OpenAI's form, and bodies of requests: read with limits, as JSON objects."""

from __future__ import annotations

import asyncio
import collections
import json
import zlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from clover_jax.data.records import shown

BODY_SECONDS = 30.0  # for a whole body to arrive
_PATIENCE = 8  # times the limit that are read of a body that is refused
# Seconds until a full queue may have room, and a server or one in its place may be ready.
RETRY = {"Retry-After": "5"}
_CLOSE = {"Connection": "close"}  # the rest of a refused body must not be read as a request

# How OpenAI names the kinds; clients choose what to raise by the status.
_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class ApiError(Exception):
    """A request is refused.

    message: what is wrong and what would be right; shown to the client.
    status: of HTTP. param: the field that is wrong. code: a word for programs.
    """

    def __init__(
        self,
        message: str,
        status: int = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """Return the error object of OpenAI's API."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        # In one line: messages of libraries may have several.
        return {
            "error": {
                "message": " ".join(str(self).split()),
                "type": _KINDS.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }


async def read_object(request: Request, max_bytes: int, seconds: float = BODY_SECONDS) -> dict:
    """Return the JSON object that a request brings.

    Raises ApiError for a body that is late, too long, or no such object.
    """
    # A page of another site can post plain text without asking first, but not JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"the Content-Type must be application/json, not {shown(kind)}", param="Content-Type"
        )

    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise ApiError(
            f"the Content-Encoding must be gzip or none, not {shown(encoding)}",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            param="Content-Encoding",
        )
    # A slow or endless body costs no more than these seconds and bytes.
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, max_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(message, HTTPStatus.REQUEST_TIMEOUT, headers=_CLOSE) from None
    return parse_object(_unzipped(body, max_bytes) if encoding == "gzip" else body)


def _unzipped(body: bytes, max_bytes: int) -> bytes:
    # Never more than the limit in memory, whatever a few bytes promise to become.
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = reader.decompress(body, max_bytes + 1)
    except zlib.error:
        raise ApiError("the body is not gzip", param="Content-Encoding") from None
    if len(text) > max_bytes:
        message = f"the body is longer than {max_bytes} bytes; ask for less at once"
        raise ApiError(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    if not reader.eof:
        raise ApiError("the body ends before its gzip stream does", param="Content-Encoding")
    return text


async def _read(request: Request, max_bytes: int) -> bytes:
    body, length = bytearray(), 0
    try:
        async for part in request.stream():
            length += len(part)
            if length <= max_bytes:
                body += part
            # Many clients read no answer before they have sent all, so more is read and dropped.
            elif length > _PATIENCE * max_bytes:
                break
    except ClientDisconnect:
        raise ApiError("the client went away before its body ended", headers=_CLOSE) from None
    if length > max_bytes:
        message = f"the body is longer than {max_bytes} bytes; ask for less at once"
        raise ApiError(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, headers=_CLOSE)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; raises ApiError where there is none.

    Stricter than Python: no NaN, and no key twice, of which readers would take different ones.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, count in collections.Counter(name for name, _ in pairs).most_common(1):
            if count > 1:
                raise ApiError(f"the key {shown(name)} is there twice", param=name)
        return dict(pairs)

    def refuse(constant: str) -> NoReturn:
        raise ApiError(f"{constant} is not a number in JSON")

    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 text: {error.reason} at {error.start}") from None
    except RecursionError:
        raise ApiError("the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # bad JSON, or a number of thousands of digits
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not {shown(value)}")
    return value
