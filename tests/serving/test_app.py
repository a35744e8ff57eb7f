"""The routes of a real server beside the answers: who is let in, and what it says of itself."""

import asyncio
import socket

import httpx2
import pytest

from clover_jax.serving.app import make_app
from clover_jax.serving.options import ServeOptions, ServeSpec
from clover_jax.serving.run import open_port
from clover_jax.serving.service import Service
from tests.serving.asking import GREEDY, refused
from tests.serving.conftest import AREA, MESSAGES


def test_nothing_is_answered_before_the_model_is_loaded(server):
    assert "loading builtin:tiny" in refused(server.early, 503)
    assert server.early.headers["retry-after"].isdecimal()


def test_a_small_write_waits_for_no_acknowledgement():
    options = ServeOptions(ServeSpec("builtin:tiny"), port=0)
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
        async def asked():
            app = make_app(Service(ServeOptions(ServeSpec(), **options)))
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as one:
                return await one.request(method, "/v1/completions", headers=asking)

        return asyncio.run(asked())

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
    async def asked():
        app = make_app(Service(ServeOptions(ServeSpec())))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as one:
            return await one.get("/v1/models", headers={"Host": host})

    refused(asyncio.run(asked()), status, "Host" if status == 403 else None)
