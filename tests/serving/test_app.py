"""The routes of a server beside the answers: who is let in, and what is refused in one form."""

import contextlib
import gzip
import json
import socket

import pytest

from clover_jax.decoding import race
from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.serving import run
from clover_jax.serving.options import ServeOptions
from clover_jax.serving.run import open_port, published_sampling
from tests.serving.asking import GREEDY, JSON, ask_app, refused, text, whole
from tests.serving.conftest import AREA, KEY, MESSAGES
from tests.serving.test_requests import BAD_CHATS, BAD_COMPLETIONS


def test_nothing_is_answered_before_the_model_is_loaded(server):
    assert "loading builtin:tiny" in refused(server.early, 503)
    assert server.early.headers["retry-after"].isdecimal()


def test_a_small_write_waits_for_no_acknowledgement():
    options = ServeOptions(ModelSpec("builtin:tiny"), port=0)
    with open_port(options) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_models_say_what_is_served(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "builtin:tiny", 512)
    assert (card["draft"], card["other_drafts"]) == ("lookup", ["none"])
    assert client.get("/v1/models/tiny").json() == card
    refused(client.get("/v1/models/gpt-4"), 404, "model")


def test_health_and_metrics_need_no_key(server):
    with server.client(key=None) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert "clover_jax_num_requests_running" in client.get("/metrics").text


@pytest.mark.parametrize("key", [None, "another", ""])
def test_a_wrong_key_is_refused(server, key):
    with server.client(key) as client:
        for response in (client.get("/v1/models"), client.post("/v1/completions", json=GREEDY)):
            refused(response, 401)
            assert response.json()["error"]["code"] == "invalid_api_key"


def test_other_hosts_are_named_in_the_refusal_and_may_be_allowed():
    host = {"Host": "host.docker.internal:8000"}
    response = ask_app("GET", "/v1/models", host)
    assert "--allowed_hosts=host.docker.internal" in refused(response, 403, "Host")
    # It has no model yet, which is asked after the host.
    asked = ask_app("GET", "/v1/models", host, allowed_hosts=("host.docker.internal",))
    assert asked.status_code == 503


def test_a_body_may_be_gzip(client):
    body, head = gzip.compress(json.dumps(GREEDY).encode()), {"Content-Encoding": "gzip"} | JSON
    plain = client.post("/v1/completions", json=GREEDY).json()["choices"]
    found = client.post("/v1/completions", content=body, headers=head)
    assert found.json()["choices"] == plain
    bomb = gzip.compress(b" " * 2**24)
    refused(client.post("/v1/completions", content=bomb, headers=head), 413)
    for wrong in (b"{}", body[:-9]):
        sent = client.post("/v1/completions", content=wrong, headers=head)
        refused(sent, 400, "Content-Encoding")
    other = head | {"Content-Encoding": "br"}
    refused(client.post("/v1/completions", content=b"x", headers=other), 415, "Content-Encoding")


def test_what_a_base_publishes_for_sampling_is_used_and_said(tmp_path, capsys):
    assert published_sampling(tmp_path) == SamplingParams(temperature=1.0)
    assert not capsys.readouterr().err
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": true, '
        '"repetition_penalty": 1.05, "suppress_tokens": [3]}'
    )
    wanted = SamplingParams(0.6, 20, 0.9, repetition_penalty=1.05)
    assert published_sampling(tmp_path) == wanted
    said = capsys.readouterr().err
    assert "1 settings are not applied: suppress_tokens [3]" in said
    assert "use temperature 0.6, top_k 20, top_p 0.9, repetition_penalty 1.05, from" in said
    for wrong in ('{"top_p": 0}', '{"temperature": "hot"}', '{"top_k": 2.5}'):
        path.write_text(wrong)
        with pytest.raises(UserError, match="--generation_config=none ignores it"):
            published_sampling(tmp_path)


def test_tokens_go_there_and_back(client, alone):
    answer = client.post("/tokenize", json={"prompt": AREA, "return_token_strs": True}).json()
    assert answer["tokens"] == alone[0]["prompt_ids"]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": AREA}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == alone[10]["prompt_ids"]
    # A field that would change the tokens and is not done is refused, as in a chat.
    asked = {"messages": MESSAGES, "add_generation_prompt": False}
    refused(client.post("/tokenize", json=asked), 400, "add_generation_prompt")


def test_other_paths_methods_and_models_are_refused(client):
    refused(client.get("/v1/embeddings"), 404)
    refused(client.get("/v1/completions"), 405)
    refused(client.post("/v1/models"), 405)
    response = client.post("/v1/completions", json=GREEDY | {"model": "gpt-4"})
    assert "tiny" in refused(response, 404, "model")
    assert response.json()["error"]["code"] == "model_not_found"


def test_plain_text_is_refused_since_any_page_may_post_it(client):
    response = client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert "application/json" in refused(response, 400, "Content-Type")


def test_pages_of_other_origins_are_let_in_by_name_only(client):
    asking = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        # What OpenAI's client sends from a page, among others.
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }

    def respond(method, **options):
        return ask_app(method, "/v1/completions", asking, **options)

    allowed = "access-control-allow-origin"
    for method in ("OPTIONS", "POST"):
        assert allowed not in respond(method).headers
        assert allowed not in respond(method, allowed_origins=("https://example.com",)).headers
        response = respond(method, allowed_origins=(asking["Origin"],))
        assert response.headers[allowed] == asking["Origin"]
    assert respond("OPTIONS", allowed_origins=(asking["Origin"],)).status_code == 200
    assert allowed not in client.get("/v1/models", headers=asking).headers


@pytest.mark.parametrize(("host", "status"), [("LocalHost:80", 503), ("example.org", 403)])
def test_without_a_key_only_names_of_this_machine_are_let_in(host, status):
    response = ask_app("GET", "/v1/models", {"Host": host})
    refused(response, status, "Host" if status == 403 else None)


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
        (b"[]", 400, "must be a JSON object"),
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
    told = (
        "prompt: prompt is too long: 600 tokens; this model's maximum context length is 512 tokens"
        ", answer included; give 511 or fewer"
    )
    assert said(path, GREEDY | {"prompt": [5] * 600}, "prompt") == told
    message = said(path, body | {"stream": True}, "prompt")
    assert "tokens and max_tokens (24) are 524; ask for 12" in message
    usage = whole(client, body | {"max_tokens": 12, "ignore_eos": True})["usage"]
    assert usage["total_tokens"] == 512
    several = body | {"prompt": [[5], [5] * 500], "max_tokens": 10**15}
    assert "max_tokens (1000000000000000)" in said(path, several, "prompt[0]")
    chat = {"messages": MESSAGES, "max_completion_tokens": 510}
    assert "max_tokens (510) are" in said("/v1/chat/completions", chat, "messages")
    for name, value, words in (
        ("logit_bias", {"2048": 1}, "must lie in 0 .. 2047, not 2048"),
        ("temperature", 1e39, "3.40282e+38 or less"),
        ("frequency_penalty", 3, "must lie in -2 .. 2"),
        ("prompt", [10**6], "1000000"),
    ):
        response = client.post(path, json=GREEDY | {name: value})
        assert words in refused(response, 400, name)


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


def test_attention_is_timed_before_requests_are_answered(monkeypatch, capsys):
    monkeypatch.setitem(race.KERNELS, "cpu", "pallas")
    monkeypatch.setattr(race, "time_in_turns", lambda *_, **__: {"xla": 2e-5, "pallas": 1e-5})
    models, _ = run._load(ServeOptions(ModelSpec("builtin:tiny")))
    assert models.attention == "pallas"
    assert "attention: pallas (xla 20 us a layer, pallas 10 us a layer)" in capsys.readouterr().err
