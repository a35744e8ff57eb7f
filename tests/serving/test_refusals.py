"""What cannot be is refused in one form, and harms nobody."""

import contextlib
import json
import socket

import pytest

from clover_jax.serving import run
from tests.serving.asking import GREEDY, JSON, refused, text, whole
from tests.serving.conftest import KEY, MESSAGES
from tests.serving.test_requests import BAD_CHATS, BAD_COMPLETIONS


@pytest.mark.parametrize(
    ("path", "table", "good"),
    [
        ("/v1/completions", BAD_COMPLETIONS, {"prompt": "Hi"}),
        ("/v1/chat/completions", BAD_CHATS, {"messages": MESSAGES}),
    ],
)
def test_bad_requests_are_refused_and_harm_nobody(client, alone, path, table, good):
    for body, param in table:
        content = json.dumps(good | body)
        if "Infinity" not in content:  # no number in JSON
            refused(client.post(path, content=content, headers=JSON), 400, param)
    assert text(client, GREEDY) == alone[0]["text"]


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8"),
        (b'{"prompt": NaN}', 400, "NaN is no number"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"prompt": "' + b"a" * 2**20 + b'"}', 413, "longer than 1048576 bytes"),
    ],
)
def test_bodies_that_are_none_are_refused(client, content, status, said):
    response = client.post("/v1/completions", content=content, headers=JSON)
    assert said in refused(response, status)


def test_what_does_not_fit_is_refused_with_both_numbers(client):
    def said(path, body, param):
        response = client.post(path, json=body)
        message = refused(response, 400, param)
        assert "--" not in message  # flags of another command
        assert response.json()["error"]["code"] == "context_length_exceeded"
        return message

    path, body = "/v1/completions", GREEDY | {"prompt": [5] * 500}
    message = said(path, GREEDY | {"prompt": [5] * 600}, "prompt")
    assert (
        message == "prompt: 600 tokens and the context is 512, answer included; give 511 or fewer"
    )
    message = said(path, body | {"stream": True}, "prompt")
    assert "500 tokens and max_tokens (24) exceed the context of 512; ask for 12" in message
    assert (
        whole(client, body | {"max_tokens": 12, "ignore_eos": True})["usage"]["total_tokens"] == 512
    )
    several = body | {"prompt": [[5], [5] * 500], "max_tokens": 10**15}
    assert "max_tokens (1000000000000000)" in said(path, several, "prompt[0]")
    chat = {"messages": MESSAGES, "max_completion_tokens": 510}
    assert "max_tokens (510) exceed" in said("/v1/chat/completions", chat, "messages")
    strange = client.post("/v1/completions", json=GREEDY | {"logit_bias": {"2048": 1}})
    assert "must lie in 0 .. 2047, not 2048" in refused(strange, 400, "logit_bias")
    hot = client.post("/v1/completions", json=GREEDY | {"temperature": 1e39})
    assert "3.40282e+38 or less" in refused(hot, 400, "temperature")
    unknown = client.post("/v1/completions", json=GREEDY | {"prompt": [10**6]})
    assert "1000000" in refused(unknown, 400, "prompt")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 this is no HTTP\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 2**16,
    ],
)
def test_what_is_no_http_is_refused_in_the_same_form(server, client, sent):
    with socket.create_connection(server.address) as connection:
        connection.settimeout(10)
        # A server that closes does not read the rest.
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):  # it may have closed with something unread
            while part := connection.recv(2**16):
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    if answer:
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_come_is_not_waited_for(server, client, monkeypatch, sent):
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.2)
    with socket.create_connection(server.address) as connection:
        connection.settimeout(30)
        connection.sendall(sent)
        assert client.get("/health").status_code == 200
        assert connection.recv(100) == b""  # closed, without an answer


def test_a_head_that_comes_byte_by_byte_has_no_longer(server, monkeypatch):
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.2)
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        connection.settimeout(0.01)
        received = None
        while received is None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(b"a")
                received = connection.recv(100)
    assert received == b""


def test_half_a_body_harms_nobody(server, client, alone):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += 'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"prompt": '
    with socket.create_connection(server.address) as connection:
        connection.sendall(head.encode())
        assert text(client, GREEDY) == alone[0]["text"]
    assert text(client, GREEDY) == alone[0]["text"]
