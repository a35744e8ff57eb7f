"""Refusals of the API, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

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
