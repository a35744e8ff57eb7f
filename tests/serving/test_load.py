"""Many clients at once, and such as go away, wait or want too much."""

import concurrent.futures
import random
import types

from clover_jax.serving.scheduler import Updates
from tests.serving.asking import GREEDY, WAYS, ask, endless, refused, streamed, text, unread
from tests.serving.conftest import AREA, KINDS


def test_many_clients_at_once_get_the_texts_that_each_would_get_alone(server, alone):
    orders = random.Random(0)
    asked = [(orders.randrange(len(KINDS)), orders.choice(WAYS)) for _ in range(24)]

    def get(kind, way):
        with server.client() as client:
            return ask(client, KINDS[kind], way)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(get, *zip(*asked, strict=True)))
    assert texts == [None if way == "leave" else alone[kind]["text"] for kind, way in asked]
    assert server.becomes("num_requests_running", 0)


def test_who_goes_away_leaves_the_slot_and_the_others_their_text(server, client, alone):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with endless(client, n=3):
            assert server.becomes("num_requests_running", 3)
            other = thread.submit(lambda: text(client, KINDS[1]))
            assert server.becomes("num_requests_running", 4)
        assert other.result() == alone[1]["text"]
    assert server.becomes("num_requests_running", 0)
    assert server.figure("num_requests_waiting") == 0


def test_a_full_queue_refuses_and_says_when_to_try_again(server, client, alone):
    with endless(client, n=4), unread(server, {"prompt": "a", "n": 16}):
        assert server.becomes("num_requests_waiting", 16)
        for streams in (False, True):
            with server.client() as other:
                response = other.post("/v1/completions", json=GREEDY | {"stream": streams})
            assert "too many requests are waiting" in refused(response, 429)
            assert response.headers["retry-after"].isdecimal()
    assert server.becomes("num_requests_waiting", 0)
    assert text(client, GREEDY) == alone[0]["text"]


def test_one_request_does_not_wait_for_another_client_s_many(server, client, alone):
    many = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "user": "many"}
    with unread(server, many | {"n": 16}):
        assert server.becomes("num_requests_waiting", 12)
        # Its turn comes after one more of theirs, though all of them were there before.
        assert text(client, GREEDY | {"user": "one"}) == alone[0]["text"]
        assert server.figure("num_requests_waiting") > 0
    assert server.becomes("num_requests_running", 0)


def test_an_answer_that_takes_too_long_is_given_up(server, client, monkeypatch, alone):
    limits = types.SimpleNamespace(request_timeout=0.05, max_waiting=16)
    body = {"prompt": AREA, "max_tokens": 480, "ignore_eos": True}
    with monkeypatch.context() as changed:
        changed.setattr(server.service.ready().scheduler, "_options", limits)
        response = client.post("/v1/completions", json=body)
        assert "longer than the server allows" in refused(response, 504)
        assert response.headers["x-should-retry"] == "false"  # as the client of OpenAI reads it
        # A stream has begun by then, so its last event says it.
        *_, last = streamed(client, body)
        assert last["error"]["type"] == "timeout_error"
    assert server.becomes("num_requests_running", 0)
    assert text(client, GREEDY) == alone[0]["text"]


def test_a_server_whose_engine_has_failed_says_so_and_is_not_healthy(server, client, monkeypatch):
    async def failing(updates):
        raise RuntimeError("the engine has failed")

    with monkeypatch.context() as changed:
        changed.setattr(Updates, "__anext__", failing)
        (only,) = streamed(client, GREEDY)
    assert only["error"]["type"] == "server_error"
    assert server.becomes("num_requests_running", 0)
    with monkeypatch.context() as changed:
        changed.setattr(server.service.ready().scheduler, "_failure", ValueError("of the device"))
        for answer in (client.get("/health"), client.post("/v1/completions", json=GREEDY)):
            assert "failed" in refused(answer, 503)
    assert client.get("/health").status_code == 200
