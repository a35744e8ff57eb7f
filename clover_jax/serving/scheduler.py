"""The scheduler: asks of many clients, and the thread that drives the device.

The event loop reads requests and writes answers; other threads tokenize. The engine's thread only
calls the device: it moves requests from the queue into slots and hands their tokens back. Of
several processes only the primary has a queue; it tells the others what to do next.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import (
    Generation,
    NewTokens,
    Request,
    RowUpdate,
    requests_of_every_kind,
)
from clover_jax.decoding.row_state import ContextOverflow, RowState, TurnProgress
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.errors import UserError
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.distributed import from_primary, process_count
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.runtime.progress import Progress, progress_bar
from clover_jax.serving.body import RETRY, ApiError
from clover_jax.serving.options import ServeOptions
from clover_jax.serving.requests import Ask
from clover_jax.training.adapting import Adapter, adapting

MOST_STEPS = 8  # from one look at the queue to the next
MOST_WAITED = 4  # steps: how long rows that decode may wait while several prompts are read
IDLE_SECONDS = 10  # how often the primary sends the others an empty iteration without requests
# How long a chunk of steps should last: text should flow, and a change in the queue be seen soon.
CHUNK_SECONDS = 0.02

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """Jobs that wait: one of each client in turn, however many it has."""

    def __init__(self):
        # Clients in the order of their turns; a client without jobs has no entry.
        self._jobs: collections.OrderedDict[str, collections.deque[Job]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain.from_iterable(self._jobs.values())

    def push(self, client: str, job: Job) -> None:
        self._jobs.setdefault(client, collections.deque()).append(job)

    def pop(self) -> Job:
        """Take the first job of the client whose turn it is."""
        client, jobs = self._jobs.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._jobs[client] = jobs  # after all other clients
        return job

    def discard(self, client: str, job: Job) -> None:
        jobs = self._jobs.get(client)
        if jobs and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._jobs[client]


@dataclasses.dataclass(eq=False)
class _Job:
    """An ask on its way: in the queue, then in a slot.

    kept: tokens that are held back, since the client does not need them yet.
    news: tokens for the client, in batches; an exception if the engine has failed.
    """

    ask: Ask
    row: RowState
    request: Request
    loop: asyncio.AbstractEventLoop
    generation: Generation
    kept: list[NewTokens] = dataclasses.field(default_factory=list)
    news: asyncio.Queue[list[NewTokens] | Exception] = dataclasses.field(
        default_factory=asyncio.Queue
    )


class _Iteration(NamedTuple):
    """What all processes do next.

    freed: slots of canceled rows. joined: requests to add. num_chunks: most chunks of prompts to
    read. num_steps: most steps to decode. compiles: whether it only compiles programs.
    """

    freed: list[int]
    joined: list[Request]
    num_chunks: int
    num_steps: int
    compiles: bool = False


class Scheduler:
    """Keeps the slots of an engine full with the asks of many clients.

    context: tokens of a prompt and its answer, at most.
    compiled: done when all programs are compiled; it has the error of an engine that failed before.
    """

    def __init__(self, models: Models, options: ServeOptions, compiles_ahead: bool = True):
        """Prepare the engine.

        compiles_ahead: compile all programs while no row is decoded; else each when it is needed.
        Raises UserError where the draft's tree cannot be decoded with.
        """
        # A shorter context is the same base: positions beyond it are never reached.
        self.context = options.model_len(models.base.config.max_position_embeddings)
        config = dataclasses.replace(models.base.config, max_position_embeddings=self.context)
        base = dataclasses.replace(models.base, config=config)
        self._models = dataclasses.replace(models, base=base)
        # Each text to copy from begins with a padding token: --copy_from's and a prediction.
        room = self.context + len(models.copy_from) + 2 if models.copies else 0
        # Rules that suit any row; each chunk runs by the cheapest that its rows allow (`adapts`).
        self._engine = self._models.engine(
            options.batch_size,
            SamplingConfig(
                *("lossless", options.draft_sampling),
                truncate=True,
                biased=True,
                penalized=True,
                masked=models.tokenizer is not None,
            ),
            seed=options.seed,
            steps_per_chunk=MOST_STEPS,
            source_size=-(-room // CACHE_CHUNK) * CACHE_CHUNK,
            adapts=True,
        )
        self._options = options
        self._numbers = itertools.count()
        self._compiling = CompileClock()

        # Long enough that later requests reuse the first one's prefix: that program compiles too.
        length = min(self._engine.prefill_size + 2, self.context - 2)
        self._uncompiled = requests_of_every_kind(length) if compiles_ahead else []
        self.num_programs = len(self._uncompiled)
        self.compiled: concurrent.futures.Future[None] = concurrent.futures.Future()
        if not self._uncompiled:
            self.compiled.set_result(None)

        # Shared with the engine's thread, under the lock.
        self._changed = threading.Condition()
        self._waiting: FairQueue[_Job] = FairQueue()
        self._running: dict[int, _Job] = {}  # by slot
        self._begun: dict[int, _Job] = {}  # in the steps whose tokens come next
        self._joining: list[_Job] = []  # out of the queue, and not yet in a slot
        self._cancelled: set[_Job] = set()  # their slots are freed next
        self._is_closing = False
        self._failure: Exception | None = None
        self._learner: Adapter | None = None
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether the engine's thread has ended by an error: nothing is decoded any more."""
        return self._failure is not None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def grammar_counts(self) -> Mapping[str, float]:
        return self._engine.grammar_counts

    @property
    def num_compiled(self) -> int:
        return self.num_programs - len(self._uncompiled)

    def compile_seconds(self, start: float) -> float:
        """Return how long decoding waited for compilation since a time of `time.perf_counter`."""
        return self._compiling.seconds_since(start)

    def seconds_since(self, start: float) -> float:
        """Return the seconds since a time of `time.perf_counter`, without compilation."""
        return time.perf_counter() - start - self.compile_seconds(start)

    def start(self) -> None:
        self._thread.start()

    async def submit(self, ask: Ask) -> Updates:
        """Put an ask into the queue and return its updates.

        Raises UserError for what cannot be decoded, ApiError while too many wait.
        """
        self._check_room()
        # A long prompt takes a while to tokenize; the event loop must not wait for it.
        job = await asyncio.to_thread(self._prepare, ask, asyncio.get_running_loop())
        with self._changed:
            if self.has_failed:
                raise RuntimeError("the engine has failed") from self._failure
            self._check_room()  # many may have been let in while their prompts were tokenized
            self._waiting.push(ask.client, job)
            self._changed.notify()
        return Updates(self, job, self._options.request_timeout)

    def _check_room(self) -> None:
        if self.num_waiting >= self._options.max_waiting:
            raise ApiError(
                "too many requests are waiting; try again later",
                HTTPStatus.TOO_MANY_REQUESTS,
                code="rate_limit_exceeded",
                headers=RETRY,
            )

    async def close(self) -> None:
        """End the engine's thread; rows that still run get no further tokens.

        Raises what the engine of several processes has failed with: all of them end.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None and process_count() > 1:
            raise self._failure

    def follow(self) -> None:
        """Do what the primary says, until it ends; for every other process.

        Raises what the engine fails with.
        """
        self._drive()
        if self._failure is not None:
            raise self._failure

    def cancel(self, job: _Job) -> None:
        with self._changed:
            self._waiting.discard(job.ask.client, job)
            self._cancelled.add(job)
            self._changed.notify()

    def _prepare(self, ask: Ask, loop: asyncio.AbstractEventLoop) -> _Job:
        # A row without a seed draws by a key made of its number, so each row gets its own number.
        prompt = dataclasses.replace(ask.prompt, index=next(self._numbers))
        row = RowState(prompt, ask.settings, self._models, ask.watched_by, ask.shown)
        try:
            request = row.next_request()
        except ContextOverflow as error:
            ask.check_room(error.num_tokens, self.context)  # in words of the API
            raise
        ask.check_room(len(request.prompt_ids), self.context)
        request = dataclasses.replace(
            request,
            turn=ask.choice,  # so that each choice draws by a key of its own
            wants_scores=ask.top_logprobs is not None,
            wants_prompt_scores=ask.prompt_logprobs,
        )
        # Checked here, not in the engine's thread, where a refusal would end every row.
        try:
            self._engine.check(request)
        except UserError as error:
            if ask.form_field is None:
                raise
            # In the words of the request.
            words = str(error).replace("structured_outputs", ask.form_field, 1)
            raise ApiError(words, param=ask.form_field) from error
        return _Job(ask, row, request, loop, Generation(prompt.index, list(request.prompt_ids)))

    @functools.cached_property
    def _bar(self) -> Progress:
        return progress_bar(self.num_programs, "compile", "program")

    @functools.cached_property
    def _slots(self) -> Engine:
        """The slots; their caches are made when the first row comes."""
        models, size = self._models, self._engine.buffer_size(self.context)
        learner = self._learner
        draft = models.draft_params if learner is None else learner.params
        return self._engine.open(models.base.params, draft, self._compiling, size, learner)

    def _drive(self) -> None:
        """Decode until the end; the engine's thread."""
        try:
            with (
                self._compiling,
                exact_matmuls(str(self._models.dtype)),
                adapting(self._models, self._options.adapt) as self._learner,
            ):
                while iteration := from_primary(self._next_iteration):
                    self._run(iteration)
        except Exception as error:
            is_alone, is_compiled = process_count() == 1, self.compiled.done()
            if is_alone and is_compiled:  # else `compiled`, `close` or `follow` raises it
                traceback.print_exc()
            with self._changed:
                self._failure = error
                failed = {*self._running.values(), *self._begun.values()}
                failed.update(self._joining, self._waiting)
                self._running.clear()
            for job in failed:
                self._tell(job, error)
            if not is_compiled:
                self.compiled.set_exception(error)
            elif not is_alone:  # the others wait for this process: let all of them end
                signal.raise_signal(signal.SIGTERM)

    def _next_iteration(self) -> _Iteration | None:
        """Return what to do next; None at the end. Waits while there is nothing to decode."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_busy or self._uncompiled or self._is_closing,
                IDLE_SECONDS if process_count() > 1 else None,
            )
            if self._is_closing:
                return None
            # Clients go first: their rows compile what they need.
            if self._uncompiled and not self._is_busy:
                return _Iteration([], self._uncompiled[:1], 2, 1, compiles=True)

            # The slots of canceled rows are free for the jobs that wait.
            freed = [slot for slot, job in self._running.items() if job in self._cancelled]
            self._cancelled.clear()
            num_free = self._slots.num_free + len(freed)
            count = min(num_free, len(self._waiting))
            self._joining = [self._waiting.pop() for _ in range(count)]

        # A step costs the same for few rows and for many, so a slot that is read late is wasted
        # time. A single prompt, however long, holds the others up for one step's time, or for
        # CHUNK_SECONDS where that is longer, or for one chunk.
        step_seconds = self._slots.step_seconds or CHUNK_SECONDS
        reading = self._slots.num_reading + count
        waited = min(max(reading, 1), MOST_WAITED) * step_seconds
        num_steps = round(CHUNK_SECONDS / step_seconds)
        return _Iteration(
            freed,
            [job.request for job in self._joining],
            max(1, int(max(CHUNK_SECONDS, waited) / self._slots.read_seconds)),
            max(1, min(num_steps, MOST_STEPS)),
        )

    @property
    def _is_busy(self) -> bool:
        return bool(self._running or self._waiting or self._begun)

    def _run(self, iteration: _Iteration) -> None:
        """Remove and add rows, read prompts, run a chunk of steps; hand out the last one's tokens.

        Every process does the same; only the primary has jobs.
        """
        slots = self._slots
        with self._changed:
            for slot in iteration.freed:
                self._running.pop(slot, None)
                slots.remove(slot)
            joined = [slots.add(request) for request in iteration.joined]
            # In the other processes, and for a request that only compiles, `_joining` is empty.
            self._running.update(zip(joined, self._joining, strict=False))
            self._joining = []

        slots.read_prompts(iteration.num_chunks)
        slots.begin(1 if slots.num_reading else iteration.num_steps)

        # The device computes now; what the host does costs it nothing.
        for new in slots.take():
            if job := self._begun.get(new.slot):
                # A message costs time of the event loop; on a CPU that is the device's time, too.
                job.kept.append(new)
                if new.is_last or job.ask.watched_by or job.ask.settings.stop:
                    self._tell(job, job.kept)
                    job.kept = []
        self._begun = dict(self._running)

        ended = slots.wait()
        slots.learn()
        with self._changed:
            for slot in ended:
                self._running.pop(slot, None)

        if iteration.compiles:
            self._bar.update()
            del self._uncompiled[0]
            if not self._uncompiled:
                self._bar.close()
                self.compiled.set_result(None)

    def _tell(self, job: _Job, news: list[NewTokens] | Exception) -> None:
        try:
            job.loop.call_soon_threadsafe(job.news.put_nowait, news)
        except RuntimeError:  # the client's loop has ended
            self.cancel(job)


class Updates:
    """An iterator over the progress of an ask.

    A watched ask gives each piece of text, any other only its end. Close it to free its slot.
    """

    def __init__(self, scheduler: Scheduler, job: _Job, seconds: float):
        # The seconds begin here, so that a request's time in the queue counts.
        self._scheduler, self._job = scheduler, job
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._has_ended = False

    def __aiter__(self) -> Updates:
        return self

    async def __anext__(self) -> TurnProgress:
        """Wait for more; raises ApiError when the time is up, RuntimeError for a failed engine."""
        while not self._has_ended:
            try:
                async with asyncio.timeout_at(self._deadline):
                    news = await self._job.news.get()
            except TimeoutError:
                await self.aclose()
                # Clients would try again, and wait as long for the same.
                raise ApiError(
                    "the answer took longer than the server allows; ask for fewer tokens",
                    HTTPStatus.GATEWAY_TIMEOUT,
                    headers={"x-should-retry": "false"},
                ) from None
            if isinstance(news, Exception):
                raise RuntimeError("the engine has failed") from news

            # `news` may hold several chunks of steps, kept back until the client needed them.
            generation = self._job.generation
            for new in news:
                generation.add(new)
            ids, is_last = [id_ for new in news for id_ in new.ids], news[-1].is_last
            progress = self._job.row.take(RowUpdate(generation, ids, is_last))
            self._has_ended = progress.ended
            if progress.ended and not is_last:  # a stop string has cut it
                self._scheduler.cancel(self._job)
            if progress.ended or progress.pieces:
                return progress
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the ask if it runs; the slot is free before the next chunk of steps."""
        # Cancels also before the first update; a generator that has not begun would not.
        if not self._has_ended:
            self._has_ended = True
            self._scheduler.cancel(self._job)
