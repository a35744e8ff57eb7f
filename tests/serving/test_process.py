"""The command as a process of its own, from its first line to its last."""

import concurrent.futures
import contextlib
import functools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time

import httpx2
import pytest

from clover_jax.serving.scheduler import IDLE_SECONDS
from tests.conftest import PYTHON, REPOSITORY, run_program
from tests.killed_processes import LAUNCH
from tests.serving.asking import WAYS, ask
from tests.serving.conftest import KINDS, MESSAGES, POINT, TEMPLATE, TOOLS, events_of, text_of

pytestmark = pytest.mark.slow

LONG = {"prompt": "def area(radius):", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def process():
    """The command, listening at a free port, and its address."""
    with serving() as started:
        yield started


@contextlib.contextmanager
def serving(*flags, count=1, **variables):
    """Yield the command with more flags, as `count` processes, and its address."""
    flags = ("--port=0", "--draft=lookup", "--batch_size=2", "--max_model_len=256", *flags)
    launch = [] if count == 1 else [LAUNCH, str(count)]
    command, pipe = [*launch, *PYTHON, "-m", "clover_jax.serve", *flags], subprocess.PIPE
    how = {"cwd": REPOSITORY, "env": os.environ | variables, "text": True}
    started = subprocess.Popen(command, stdout=pipe, stderr=pipe, **how)
    try:
        said = ""
        for line in started.stderr:
            said += line
            ready = re.search(r"serving builtin:tiny with .* on (http://\S+)", line)
            if ready:
                break
        else:
            raise AssertionError(said)
        yield started, ready[1]
    finally:
        for number in re.findall(r"\d+", said.partition("process ids")[2].partition("\n")[0]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        started.kill()
        started.communicate()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", ["README.md", "clover_jax/serving/README.md"])
def test_the_curl_lines_of_a_page_are_answered(process, page):
    _, url = process
    lines = (REPOSITORY / page).read_text().replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("curl ")]
    assert commands
    for command in commands:
        words = shlex.split(command.replace("http://127.0.0.1:8000", url))
        said = run_program(*words).stdout
        if '"stream": true' in command:
            assert said.endswith("data: [DONE]\n\n")
        else:
            answer = json.loads(said)
            assert answer["usage"]["completion_tokens"] == 24
            assert answer["choices"][0]["text"]


def test_as_many_connections_are_served_as_the_flag_names():
    with serving("--max_connections=2") as (_, url), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx2.Client(base_url=url)) for _ in range(3)]
        assert [client.get("/health").status_code for client in clients] == [200, 200, 503]


def test_a_server_that_is_told_to_stop_answers_what_it_has_taken(process):
    started, url = process
    clients = [httpx2.Client(base_url=url, timeout=120) for _ in range(2)]
    pool = concurrent.futures.ThreadPoolExecutor(8)
    with clients[0] as client, clients[1] as other, pool as threads:
        wanted = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        # Two run and the others wait.
        post = functools.partial(httpx2.post, f"{url}/v1/completions", json=LONG, timeout=120)
        taken = [threads.submit(post) for _ in range(6)]
        body = LONG | {"stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            started.send_signal(signal.SIGTERM)
            while (late := other.get("/health")).status_code == 200:
                pass
            assert late.status_code == 503
            assert "is stopping" in late.json()["error"]["message"]
            text = "".join(text_of(chunk["choices"][0]) for chunk in events_of(response))

        answers = [request.result() for request in taken]
        assert text == wanted
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == wanted
            else:  # it came after the signal
                assert answer.status_code == 503
                assert "is stopping" in answer.json()["error"]["message"]

    said, errors = started.communicate(timeout=60)
    assert started.returncode == 0, errors
    report = json.loads(said.splitlines()[-1])
    num_answered = 2 + sum(answer.status_code == 200 for answer in answers)
    assert (report["answers"], report["tokens"]) == (num_answered, 200 * num_answered)
    assert report["tau"] > 1


def test_mixed_requests_of_64_clients_get_the_texts_that_each_would_get_alone(tmp_path):
    """2 000 requests: text, calls, forms, penalties; whole, streamed, or left in the middle."""
    (tmp_path / "template").write_text(TEMPLATE)
    point = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    chat = {"messages": MESSAGES, "temperature": 1, "max_tokens": 250, "seed": 4}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5}
    kinds = [
        *KINDS,
        chat | {"tools": TOOLS, "tool_choice": "required"},
        chat | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        chat | {"tools": TOOLS, "max_tokens": 24},
        chat | {"response_format": point, "temperature": 0},
        chat | {"response_format": point, "top_p": 0.9} | penalties,
        chat | {"response_format": {"type": "json_object"}, "max_tokens": 60, "logprobs": True},
        chat | {"guided_choice": ["left", "right"], "min_p": 0.01},
    ]
    orders = random.Random(0)
    asked = [(orders.randrange(len(kinds)), orders.choice(WAYS)) for _ in range(2000)]
    flags = f"--chat_template={tmp_path / 'template'}", "--batch_size=16", "--max_model_len=512"
    with serving(*flags) as (started, url), httpx2.Client(base_url=url, timeout=600) as client:
        alone = [ask(client, body, "whole") for body in kinds]

        def get(kind, way):
            with httpx2.Client(base_url=url, timeout=600) as other:
                return ask(other, kinds[kind], way)

        with concurrent.futures.ThreadPoolExecutor(64) as threads:
            texts = list(threads.map(get, *zip(*asked, strict=True)))
        assert texts == [None if way == "leave" else alone[kind] for kind, way in asked]
        started.send_signal(signal.SIGTERM)
        out, errors = started.communicate(timeout=60)
    assert (started.returncode, "Traceback" in errors) == (0, False), errors
    # Some have their answer before they leave.
    num_answered = len(kinds) + len(texts) - texts.count(None)
    assert num_answered <= json.loads(out.splitlines()[-1])["answers"] <= len(kinds) + len(texts)


def texts(url):
    """Ask a server for several kinds of texts, at once."""
    drawn = LONG | {"temperature": 1, "seed": 3, "n": 3, "max_tokens": 60}
    biased = LONG | {"logit_bias": {"5": 2}, "max_tokens": 60}
    ask = functools.partial(httpx2.post, f"{url}/v1/completions", timeout=300)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = threads.map(lambda body: ask(json=body).json(), (LONG, drawn, biased))
    return [choice["text"] for answer in answers for choice in answer["choices"]]


def test_a_mesh_gives_the_text_of_one_device(process):
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with serving("--mesh=data=2", **devices) as (_, url):
        assert texts(url) == texts(process[1])


@pytest.mark.parametrize("mesh", ["data=2", "tensor=2"])
def test_two_processes_serve_as_one(process, mesh):
    with serving(f"--mesh={mesh}", count=2) as (started, url):
        wanted = texts(process[1])
        assert texts(url) == wanted

        # A client that goes away leaves its slot; both processes go on, and end together.
        body = LONG | {"stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
            next(response.iter_lines())
        time.sleep(2.5 * IDLE_SECONDS)  # nothing to do; the other process waits meanwhile
        assert texts(url) == wanted
        started.send_signal(signal.SIGTERM)
        said, errors = started.communicate(timeout=120)
    assert started.returncode == 0, errors
    assert said.count('"answers"') == 1
    assert json.loads(said.splitlines()[-1])["answers"] == 10  # the other one left


@pytest.mark.parametrize("killed", [0, 1])
def test_processes_that_serve_end_when_one_is_killed(killed):
    with serving("--mesh=data=2", count=2) as (started, url):
        found = run_program("pgrep", "-P", str(started.pid), "-f", "clover_jax.serve")
        processes = found.stdout.split()
        assert len(texts(url)) == 5
        os.kill(int(sorted(processes, key=int)[killed]), signal.SIGKILL)
        _, errors = started.communicate(timeout=120)
    assert started.returncode == 128 + signal.SIGKILL, errors
    assert f"process {killed} was killed by signal 9; the others end too" in errors
    assert "Traceback" not in errors


def test_a_head_is_compared_with_copies_alone_and_with_no_draft():
    with (
        serving("--draft=random:clover2", "--tree=chain:2") as (_, url),
        httpx2.Client(base_url=url, timeout=300) as client,
    ):
        (card,) = client.get("/v1/models").json()["data"]
        assert (card["draft"], card["other_drafts"]) == ("random:clover2", ["none", "lookup"])
        forwards = {}
        for draft in (None, *card["other_drafts"]):
            asked = {"draft": draft, "stream": True, "forwards": True}
            answer = client.post("/v1/completions", json=LONG | asked)
            choices = [event["choices"][0] for event in events_of(answer) if event["choices"]]
            told = [choice["forward"]["forward"] for choice in choices if "forward" in choice]
            forwards[draft] = "".join(map(text_of, choices)), max(told)
    texts, counts = zip(*forwards.values(), strict=True)
    assert len(set(texts)) == 1
    # The text loops, so that copies are what helps; a head with random weights guesses nothing.
    assert counts[1] == 199
    assert counts[2] < 100
