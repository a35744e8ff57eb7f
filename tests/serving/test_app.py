"""A real server answers as OpenAI's would, with the text that `generate` gives."""

import concurrent.futures
import contextlib
import json
import random
import socket

import jax
import numpy as np
import pytest

from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.models.decoder import Decoder, causal_mask, project
from tests.serving.conftest import (
    AREA,
    CLOSE,
    CONVERSATION,
    KEY,
    KINDS,
    MESSAGES,
    events_of,
    path_of,
    text_of,
)
from tests.serving.test_requests import BAD_CHATS, BAD_COMPLETIONS

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


def refused(response, status, param=None):
    """Return the message of a refusal, which must be in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return error["message"]


def test_nothing_is_answered_before_the_programs_are_compiled(server):
    assert "is being loaded" in refused(server.early, 503)
    assert server.early.headers["retry-after"].isdecimal()


def test_models_say_what_is_served(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "builtin:tiny", 512)
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


def test_every_kind_has_the_text_of_generate(client, alone):
    for body, row in zip(KINDS, alone, strict=True):
        answer = whole(client, body)
        (choice,) = answer["choices"]
        usage = answer["usage"]
        assert text_of(choice) == row["text"]
        assert usage["prompt_tokens"] == len(row["prompt_ids"])
        assert usage["completion_tokens"] == len(row["output_ids"])
        reason = "length" if row["finish_reason"] == "length" else "stop"
        assert choice["finish_reason"] == reason
    assert {row["finish_reason"] for row in alone} >= {"length", "stop"}


def test_every_kind_streams_its_whole_answer(client, alone):
    for body, row in zip(KINDS, alone, strict=True):
        *chunks, last = streamed(client, body | {"stream_options": {"include_usage": True}})
        assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == row["text"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert not any(reasons[:-1])
        assert reasons[-1] == ("length" if row["finish_reason"] == "length" else "stop")
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(row["output_ids"])


def test_turns_of_a_conversation_are_those_of_generate(client, decoded):
    messages = []
    for question, answer in zip(CONVERSATION["turns"], decoded[-1]["text"], strict=True):
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        assert text(client, body) == answer
        messages.append({"role": "assistant", "content": answer})


def test_the_first_chunk_of_a_chat_says_who_speaks(client):
    chunks = streamed(client, {"messages": MESSAGES, "max_tokens": 4, "temperature": 0})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)


def test_several_prompts_have_an_answer_each_in_their_order(client, alone):
    body = GREEDY | {"prompt": [CLOSE, AREA], "max_tokens": 24}
    texts = [text_of(choice) for choice in whole(client, body)["choices"]]
    assert texts == [text(client, body | {"prompt": prompt}) for prompt in body["prompt"]]
    ids = [alone[1]["prompt_ids"], alone[0]["prompt_ids"]]
    answer = whole(client, body | {"prompt": ids})
    assert [text_of(choice) for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_choices_are_drawn_apart_and_the_same_again(client, alone):
    body = KINDS[2] | {"n": 3}
    answer = whole(client, body)
    texts = [text_of(choice) for choice in answer["choices"]]
    assert texts[0] == alone[2]["text"]
    assert len(set(texts)) == 3
    assert [text_of(choice) for choice in whole(client, body)["choices"]] == texts
    # A prompt counts once, however many answers it has.
    assert answer["usage"]["prompt_tokens"] == len(alone[2]["prompt_ids"])

    pieces = {0: "", 1: "", 2: ""}
    for chunk in streamed(client, body):
        (choice,) = chunk["choices"]
        pieces[choice["index"]] += text_of(choice)
    assert list(pieces.values()) == texts


def test_echo_puts_the_prompt_first(client, alone):
    answer = whole(client, GREEDY | {"echo": True})
    assert text_of(answer["choices"][0]) == AREA + alone[0]["text"]
    answer = whole(client, GREEDY | {"echo": True, "max_tokens": 0})
    assert text_of(answer["choices"][0]) == AREA
    assert answer["usage"]["completion_tokens"] == 0


def test_an_answer_and_its_echo_are_scored_alike(client, alone):
    prompt_ids, output_ids = alone[0]["prompt_ids"], alone[0]["output_ids"]
    body = {"temperature": 0, "logprobs": 3}
    (answer,) = whole(client, body | {"prompt": prompt_ids, "max_tokens": 24})["choices"]
    both = {"prompt": prompt_ids + output_ids, "max_tokens": 0, "echo": True}
    (echo,) = whole(client, body | both)["choices"]

    ours, theirs = answer["logprobs"], echo["logprobs"]
    count, before = len(output_ids), len(prompt_ids)
    assert theirs["tokens"][before:] == ours["tokens"]
    assert theirs["token_logprobs"][0] is None
    assert len(ours["token_logprobs"]) == count
    assert theirs["token_logprobs"][before:] == pytest.approx(ours["token_logprobs"], abs=1e-4)
    # A greedy token is the most probable one; the offsets say where each begins.
    for token, value, top in zip(
        ours["tokens"], ours["token_logprobs"], ours["top_logprobs"], strict=True
    ):
        assert value == max(top.values()) == top[token]
        assert len(top) == 3
    for token, offset in zip(ours["tokens"], ours["text_offset"], strict=True):
        assert answer["text"].startswith(token, offset)


def test_scores_of_a_prompt_are_those_of_one_forward(server, client, alone):
    ids = alone[1]["prompt_ids"] + alone[1]["output_ids"]
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    (echo,) = whole(client, body)["choices"]

    base = server.service.ready().models.base
    positions = np.arange(len(ids))[None]
    mask = causal_mask(1, len(ids))
    variables = {"params": base.params}
    output = Decoder(base.config).apply(variables, np.array([ids]), positions, mask)
    logits = project(frozen_from_base(base.params).lm_head, output.hidden["post_norm"])[0]
    wanted = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(ids) - 1), ids[1:]]
    assert echo["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)


def test_a_chat_s_tokens_are_scored(client):
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    (choice,) = whole(client, body | {"logprobs": True, "top_logprobs": 2})["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == text_of(choice)
    assert all(token["bytes"] == list(token["token"].encode()) for token in tokens)
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in tokens)

    chunks = streamed(client, body | {"logprobs": True, "top_logprobs": 2})
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for logprobs in told if logprobs for token in logprobs["content"]] == tokens


def test_a_prediction_changes_no_text_and_is_counted(client, alone):
    prediction = {"type": "content", "content": alone[0]["text"] + " and no more"}
    answer = whole(client, GREEDY | {"prediction": prediction})
    assert text_of(answer["choices"][0]) == alone[0]["text"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] > 0


def test_tokens_go_there_and_back(client, alone):
    answer = client.post("/tokenize", json={"prompt": AREA, "return_token_strs": True}).json()
    assert answer["tokens"] == alone[0]["prompt_ids"]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": AREA}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == alone[10]["prompt_ids"]


def test_tau_of_the_metrics_is_that_of_the_answers(server, client):
    names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    before = [server.figure(name) for name in names]
    forwards = accepted = 0
    for body in KINDS[:4]:
        told = [
            chunk["choices"][0]["forward"]
            for chunk in streamed(client, body | {"forwards": True})
            if "forward" in chunk["choices"][0]
        ]
        # Prefill, forward 0, drafts nothing. A piece of text that was held back has no tokens.
        drafted = [
            piece["num_tokens"] for piece in told if piece["forward"] and piece["num_tokens"]
        ]
        forwards, accepted = forwards + len(drafted), accepted + sum(drafted) - len(drafted)
    after = [server.figure(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [forwards, accepted]
    assert accepted > 0


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


@contextlib.contextmanager
def endless(client, **changes):
    """Yield the lines of an answer that goes on for long, once it has begun."""
    body = {"prompt": AREA, "max_tokens": 480, "ignore_eos": True, "stream": True} | changes
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_who_goes_away_leaves_the_slot_and_the_others_their_text(server, client, alone):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with endless(client, n=3):
            assert server.becomes("num_requests_running", 3)
            other = thread.submit(lambda: text(client, KINDS[1]))
            assert server.becomes("num_requests_running", 4)
        assert other.result() == alone[1]["text"]
    assert server.becomes("num_requests_running", 0)
    assert server.figure("num_requests_waiting") == 0


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
    response = client.post("/v1/completions", json=GREEDY | {"prompt": [5] * 600})
    message = refused(response, 400, "prompt")
    assert "600" in message
    assert "512" in message
    unknown = client.post("/v1/completions", json=GREEDY | {"prompt": [10**6]})
    assert "1000000" in refused(unknown, 400, "prompt")


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
