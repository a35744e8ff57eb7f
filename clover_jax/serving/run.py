"""One run of `serve`: a port at once, the models behind it when they are ready, and an end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from clover_jax.checkpoints.quantization import quantization_notice
from clover_jax.checkpoints.shapes import shape_notice
from clover_jax.data.chat_templates import template_text, words_of
from clover_jax.data.records import shown
from clover_jax.decoding.models import Models, load, tree_notice
from clover_jax.decoding.race import with_attention
from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.decoding.spec import NO_DRAFT
from clover_jax.errors import UserError
from clover_jax.field_types import check_values
from clover_jax.runtime.device_memory import advise_on_memory, keep_freed_memory
from clover_jax.runtime.distributed import from_primary, process_count
from clover_jax.runtime.dtypes import exact_matmuls, resolve_dtype
from clover_jax.runtime.files import read_json_object
from clover_jax.runtime.progress import passing_note, say
from clover_jax.serving.app import make_app
from clover_jax.serving.body import ApiError
from clover_jax.serving.calls import style_of
from clover_jax.serving.options import ServeOptions
from clover_jax.serving.requests import Served
from clover_jax.serving.scheduler import Scheduler
from clover_jax.serving.service import Ready, Service, is_loopback
from clover_jax.serving.token_texts import TokenTexts

T = TypeVar("T")

_BACKLOG = 2048  # connections that the system keeps while the loop is busy
_KEEP_ALIVE_SECONDS = 30
HEAD_SECONDS = 30.0  # for the head of a request to arrive
_HEAD_BYTES = 2**15  # of a request's line and headers


def run(options: ServeOptions) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C, answer what was let in, and return the figures to report.

    Of several processes the primary serves, the others run its steps and return nothing. Raises
    UserError for a port that cannot be had and for models that cannot be loaded.
    """
    service, listeners = Service(options), []
    # Only the primary opens a port, and before the models load: the port may be taken.
    from_primary(lambda: listeners.append(open_port(options)))
    if not listeners:
        _follow(options)
        return {}
    with listeners[0] as listener, _dying_at_once():
        say(f"listening at {_url(options, listener)}; loading {options.spec.base}")
        asyncio.run(_serve_until_signal(service, listener))
    return service.metrics.totals()


def _follow(options: ServeOptions) -> None:
    """Run the steps of the primary until it ends."""
    _, scheduler = _load(options)

    def ignore_signals(_: object) -> None:
        # The primary hears a signal too, answers what it has taken, and says when to end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    scheduler.compiled.add_done_callback(ignore_signals)
    with _advice_on_memory(options):
        scheduler.follow()


def open_port(options: ServeOptions) -> socket.socket:
    """Return a socket that listens; raises UserError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        port = socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "give another --port, or --port=0 for a free one",
            errno.EACCES: "give a --port from 1024",
        }
        raise UserError(
            f"cannot listen at {options.host}, port {options.port}: {error.strerror}; "
            f"{advice.get(error.errno or 0, 'give a --host of this machine')}"
        ) from error
    # Connections inherit it. Without it each small write after the first waits until the client has
    # acknowledged that one: 40 ms, by Nagle's algorithm and delayed acknowledgements.
    port.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return port


async def serve(service: Service, listener: socket.socket, stop: asyncio.Event) -> None:
    """Answer at a port until `stop`; every request gets 503 before the models are loaded.

    What has been let in by then is answered. Raises UserError for models that cannot be loaded.
    """
    server, options = _server(service), service.options
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        # In a thread: the event loop answers 503 meanwhile.
        ready = await _in_thread(lambda: _start(options))
        service.open(ready)
        _tell_open(service, ready, listener)

        # Requests are answered meanwhile; each waits for the programs that it needs.
        stopping = asyncio.create_task(stop.wait())
        compiled = asyncio.wrap_future(ready.scheduler.compiled)
        await asyncio.wait((stopping, compiled), return_when=asyncio.FIRST_COMPLETED)
        if compiled.done():
            with _advice_on_memory(options):
                compiled.result()
            service.is_needed.set()
            draft = "no draft" if options.spec.draft == NO_DRAFT else options.spec.draft
            say(f"serving {options.model_name} with {draft} on {_url(options, listener)}")
        await stopping
        # Open requests still need the engines, so these end last.
        await service.drain()
        for scheduler in ready.schedulers:
            await scheduler.close()
    finally:
        server.should_exit = True  # also where the models could not be loaded
        await serving


def _server(service: Service) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            make_app(service),
            http=_Protocol,
            ws="none",
            lifespan="off",
            # Only what is a bug is logged, with its traceback; never a request.
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            # uvicorn counts the connection that asks too.
            limit_concurrency=service.options.max_connections + 1,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would end the process by them once all is answered."""
        yield


class _Protocol(H11Protocol):
    """uvicorn's protocol; it closes a connection whose next request does not begin in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_head()

    def _watch_head(self) -> None:
        # Between two requests uvicorn has its own limit, which the first byte ends.
        if self.cycle is not None and not self.cycle.response_complete:
            # The head of this request is complete; body and answer have limits of their own.
            self._forget_head()
        elif self._head_timer is None:
            # Later bytes do not restart the timer: slow ones would hold the connection.
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the form of all other refusals."""
        # After the beginning of another answer this one has no place.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(msg).body()).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for part in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


def _start(options: ServeOptions) -> Ready:
    """Load the models, and start the schedulers of the server's draft and of other drafts."""
    models, scheduler = _load(options)
    alone = dataclasses.replace(options, batch_size=1, draft_sampling="auto", adapt=None)
    with exact_matmuls(str(models.dtype)):
        others = {
            draft: Scheduler(other, alone, compiles_ahead=False)
            for draft, other in _to_compare_with(models, options).items()
        }

    for each in (scheduler, *others.values()):
        each.start()

    # A template without a place for tools would leave them out in silence.
    tokenizer = models.tokenizer
    words = frozenset(words_of(tokenizer) if tokenizer is not None else ())
    style = style_of(template_text(tokenizer) if tokenizer else "", options.tool_call_format)
    usual = SamplingParams(temperature=1.0)
    if options.generation_config == "auto":
        usual = published_sampling(models.base.directory)
    named, context = options.model_name, scheduler.context
    served = Served(named, context, options.max_waiting, words, usual, style)
    return Ready(models, served, TokenTexts(models.tokenizer), scheduler, others)


# Of generation_config.json: all but the two of OpenAI's that Hugging Face does not know, as vLLM
# reads the file; and fields that need nothing here.
_PUBLISHED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_HARMLESS = frozenset(
    ("do_sample", "eos_token_id", "bos_token_id", "pad_token_id")
    + ("transformers_version", "_from_model_config", "max_length", "max_new_tokens")
)


def published_sampling(directory: Path) -> SamplingParams:
    """Return, and say, the sampling that generation_config.json names; without one temperature 1.

    Raises UserError for values that make no distribution.
    """
    path = directory / "generation_config.json"
    values = read_json_object(path) if path.is_file() else {}
    # Others may change the scores too.
    known = {*_PUBLISHED, *_HARMLESS}
    others = {name: x for name, x in values.items() if x is not None and name not in known}
    if others:
        listed = ", ".join(f"{name} {shown(value)}" for name, value in others.items())
        say(f"{path}: {len(others)} settings are not applied: {listed}")
    found = {name: values.get(name) for name in _PUBLISHED}
    given = {name: value for name, value in found.items() if value is not None}
    try:
        check_values(SamplingParams, given)
        usual = SamplingParams(**{"temperature": 1.0} | given)
    except UserError as error:
        raise UserError(f"{path}: {error}; --generation_config=none ignores it") from None
    if given:
        listed = ", ".join(f"{name} {value:g}" for name, value in given.items())
        say(f"requests that do not say use {listed}, from generation_config.json")
    return usual


def _load(options: ServeOptions) -> tuple[Models, Scheduler]:
    spec = options.spec
    with exact_matmuls(str(resolve_dtype(spec.dtype))):
        with passing_note(f"loading {spec.base}"):
            models = load(spec)
        models = with_attention(models, spec.attention, options.batch_size)
        say(shape_notice(spec.base))
        say(quantization_notice(spec.int8))
        say(tree_notice(spec, models))
        keep_freed_memory()  # from here on: what loading has freed goes back to the system
        return models, Scheduler(models, options)


def _advice_on_memory(options: ServeOptions) -> contextlib.AbstractContextManager[None]:
    advice = "give a smaller --batch_size or --max_model_len, or --dtype=bfloat16"
    return advise_on_memory(f"decode {options.batch_size} requests at once", advice)


def _to_compare_with(models: Models, options: ServeOptions) -> dict[str, Models]:
    """Return what the page compares with the server's own draft, each with one slot.

    Programs and caches are made when somebody looks. Several processes run one engine only.
    """
    if not options.page or models.draft is None or process_count() > 1:
        return {}
    # The base's weights are shared; only caches are made for each.
    compared = {NO_DRAFT: models.plain()}
    if options.spec.draft != "lookup":
        lookup = dataclasses.replace(options.spec, draft="lookup", tree=None, copy=0)
        compared["lookup"] = load(lookup, compared[NO_DRAFT])
    return compared


def _url(options: ServeOptions, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell_open(service: Service, ready: Ready, listener: socket.socket) -> None:
    options, models = service.options, ready.models
    if models.tokenizer is not None and models.tokenizer.chat_template is None:
        say(
            "the base has no chat template: messages are joined by newlines, and nothing says who "
            "speaks; --chat_template=FILE gives one"
        )
    if not (is_loopback(options.host) or service.needs_key):
        host = listener.getsockname()[0]
        say(f"anybody who reaches {host} may use this server; --api_key_file=FILE asks for a key")
    count = ready.scheduler.num_programs
    say(f"compiling {count} programs; requests are taken, and wait for those that they need")


async def _in_thread(work: Callable[[], T]) -> T:
    """Return what `work` gives, done in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        # A loop that has been closed meanwhile wants to know nothing.
        with contextlib.suppress(RuntimeError):
            try:
                loop.call_soon_threadsafe(result.set_result, work())
            except Exception as error:
                loop.call_soon_threadsafe(result.set_exception, error)

    # asyncio's own threads are waited for at the end, and loading may take minutes.
    threading.Thread(target=run, name="loading", daemon=True).start()
    return await result


async def _serve_until_signal(service: Service, listener: socket.socket) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    async def stop_on_signal() -> None:
        # Before the first request nothing is lost by dying at once.
        await service.is_needed.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell may have made a background job ignore Ctrl-C; that is kept.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop.set)

    listening = asyncio.create_task(stop_on_signal())
    try:
        await serve(service, listener, stop)
    finally:
        listening.cancel()


@contextlib.contextmanager
def _dying_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process as SIGTERM does, until somebody listens to both.

    A thread that compiles cannot be interrupted, and Python would wait for it.
    """
    before = signal.getsignal(signal.SIGINT)
    # Any other handler is the caller's, and stays.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
