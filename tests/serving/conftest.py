"""One real server that the tests of this folder share, and texts to compare its answers with."""

import asyncio
import contextlib
import dataclasses
import json
import queue
import threading
import time

import httpx2
import pytest

from clover_jax import api
from clover_jax.decoding.models import load
from clover_jax.decoding.spec import ModelSpec
from clover_jax.serving.options import ServeOptions
from clover_jax.serving.run import open_port, serve
from clover_jax.serving.service import Service

KEY = "a-key-of-the-tests"
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}
{% endif %}\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

# A request as a client writes it -> the same as a row of `generate`.
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
AREA, CLOSE = "def area(radius):", "class Chunk:\n\n    def close(self):"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def area("}]
KINDS = [
    {"prompt": AREA, "max_tokens": 24, "temperature": 0},
    {"prompt": CLOSE, "max_tokens": 40, "temperature": 0},
    {"prompt": AREA, "max_tokens": 24, "temperature": 1, "seed": 7},
    {"prompt": CLOSE, "max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 2**31},
    {"prompt": AREA, "max_tokens": 17, "temperature": 1.2, "top_k": 5, "seed": 3},
    {"prompt": [0, 293, 325, 689], "max_tokens": 12, "temperature": 0},
    {"prompt": AREA, "max_tokens": 40, "temperature": 0, "stop": ["list"]},
    {"prompt": CLOSE, "max_tokens": 40, "temperature": 1, "seed": 5, "stop": ["(", ":"]},
    {"prompt": "import os\n" * 40, "max_tokens": 20, "temperature": 0},
    {"prompt": AREA, "max_tokens": 1, "temperature": 0},
    {"messages": MESSAGES, "max_tokens": 24, "temperature": 0},
    {"messages": MESSAGES[1:], "max_tokens": 24, "temperature": 1, "seed": 11},
    # 1 is EOS.
    {"prompt": AREA, "max_tokens": 24, "min_tokens": 7, "logit_bias": {"1": 100}, "temperature": 0},
    {"prompt": AREA, "max_tokens": 24, "logit_bias": {"293": -9}, "temperature": 1, "seed": 5},
    {"prompt": AREA, "max_tokens": 24, "temperature": 0, "repetition_penalty": 1.3},
    {"prompt": CLOSE, "max_tokens": 24, "temperature": 1, "seed": 5, "frequency_penalty": 0.5,
     "presence_penalty": 1, "min_p": 0.1},
    {"prompt": CLOSE, "max_tokens": 60, "temperature": 1, "seed": 9,
     "structured_outputs": {"regex": "[a-z]{3,9} = [0-9]{1,4}"}},
    {"prompt": AREA, "max_tokens": 40, "temperature": 0, "stop": ["list"],
     "include_stop_str_in_output": True},
    # 0 is BOS, which is special.
    {"prompt": CLOSE, "max_tokens": 4, "temperature": 0, "logit_bias": {"0": 100},
     "skip_special_tokens": False},
]  # fmt: skip
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "$defs": {"kind": {"enum": ["a", "b"]}},
    "additionalProperties": False,
    "required": ["x", "kind"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": POINT}} for name in "fg"]
CONVERSATION = {"turns": ["def area(", "Go on.", "And?"], "max_new_tokens": 24, "temperature": 0}


def as_row(body):
    """Return a request as a row of the command `generate`."""
    row = {_NAMES.get(name, name): value for name, value in body.items()}
    return {("prompt_ids" if type(v) is list and k == "prompt" else k): v for k, v in row.items()}


def path_of(body):
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def events_of(response):
    """Return the values of server-sent events; the last one must be the word that ends them."""
    lines = [line for line in response.iter_lines() if line and line[0] != ":"]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(choice):
    """Return the text of a choice, of any of the four kinds of body."""
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""


@dataclasses.dataclass
class Running:
    """A server that runs in this process. early: what it answered before it was ready."""

    url: str
    service: Service
    early: httpx2.Response

    def client(self, key=KEY):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60)

    @property
    def address(self):
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def figures(self):
        """Return name with labels -> value of /metrics."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return {n: float(v) for n, v in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def figure(self, name):
        return self.figures()[f'clover_jax_{name}{{model_name="tiny"}}']

    def becomes(self, name, value, seconds=1.0):
        """Return whether a figure has a value before long."""
        end = time.monotonic() + seconds
        while self.figure(name) != value and time.monotonic() < end:
            time.sleep(0.01)
        return self.figure(name) == value


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server of builtin:tiny that drafts by copies, with four slots and a short queue."""
    template = tmp_path_factory.mktemp("serving") / "template.jinja"
    template.write_text(TEMPLATE)
    spec = ModelSpec("builtin:tiny", draft="lookup", chat_template=str(template), tree="copy:9")
    with running(spec, batch_size=4, max_model_len=512, max_waiting=16) as server:
        yield server


@contextlib.contextmanager
def running(spec, **options):
    """Yield a server that runs in this process until the end."""
    options = ServeOptions(spec, port=0, api_key=(KEY,), served_model_name="tiny", **options)
    service, begun, asked = Service(options), queue.Queue(), threading.Event()

    def load_once_asked(*arguments):
        asked.wait()
        return load(*arguments)

    async def main(listener):
        stop = asyncio.Event()
        begun.put((asyncio.get_running_loop(), stop))
        await serve(service, listener, stop)

    with open_port(options) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(main(listener)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("clover_jax.serving.run.load", load_once_asked)
            thread.start()
            loop, stop = begun.get()
            early = httpx2.get(f"{url}/health")
            asked.set()
        while thread.is_alive() and httpx2.get(f"{url}/health").status_code == 503:
            time.sleep(0.1)
        try:
            yield Running(url, service, early)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def decoded(server):
    """The rows that plain decoding gives for `KINDS` and `CONVERSATION`, in their order."""
    models = server.service.ready().models.plain()
    rows = api.generate_rows(models, [*map(as_row, KINDS), CONVERSATION], batch_size=4)
    return sorted(rows, key=lambda row: row["index"])


@pytest.fixture(scope="session")
def alone(decoded):
    """The rows of `KINDS`."""
    return decoded[:-1]
