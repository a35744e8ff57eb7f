"""Many clients at once, and such as go away, wait or want too much."""

import concurrent.futures
import random

import pytest

from tests.serving.asking import GREEDY, endless, refused, streamed, text, unread
from tests.serving.conftest import KINDS, path_of, text_of


@pytest.mark.parametrize("count", [64, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_clients_at_once_get_the_texts_that_each_would_get_alone(server, alone, count):
    orders = random.Random(0)
    ways = ["whole", "stream", "stream", "whole", "leave"]  # a fifth goes away in the middle
    asked = [(orders.randrange(len(KINDS)), orders.choice(ways)) for _ in range(count)]

    def ask(kind, way):
        with server.client() as client:
            if way == "whole":
                return text(client, KINDS[kind])
            if way == "stream":
                chunks = streamed(client, KINDS[kind])
                return "".join(text_of(chunk["choices"][0]) for chunk in chunks)
            body = KINDS[kind] | {"stream": True}
            with client.stream("POST", path_of(body), json=body) as response:
                next(response.iter_lines())
            return None

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(ask, *zip(*asked, strict=True)))
    wanted = [None if way == "leave" else alone[kind]["text"] for kind, way in asked]
    assert texts == wanted
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


def test_who_waits_for_a_whole_answer_and_goes_away_leaves_the_slot(server):
    with unread(server, {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "n": 4}):
        assert server.becomes("num_requests_running", 4)
    assert server.becomes("num_requests_running", 0)


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
