"""Figures for Prometheus, each under our own name and under vLLM's, for its dashboards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from clover_jax.decoding.row_state import TurnProgress, copied_parts, forward_groups

_OURS, _THEIRS = "clover_jax_", "vllm:"
# A name begins its line, or follows the words of a comment.
_NAME = re.compile(rf"^(# HELP |# TYPE |){_OURS}", re.MULTILINE)

# Upper bounds of the buckets of histograms.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# What engines count of structured outputs.
_GRAMMARS = {
    "compile_seconds": "time spent compiling schemas and other forms",
    "mask_seconds": "time spent making the masks of drafted trees",
    "draft_tokens": "tokens that forms forced, drafted",
    "accepted_tokens": "tokens that forms forced, drafted and accepted",
}

# Why an answer ended, in OpenAI's words.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Forward(NamedTuple):
    """One forward after prefill.

    num_accepted: tokens beyond the one that plain decoding would have given. num_drafted: drafted
        tokens that it verified. num_copied: how many of its tokens were copies of the text.
    """

    num_accepted: int
    num_drafted: int
    num_copied: int


def forwards_of(progress: TurnProgress) -> list[Forward]:
    """Return the forwards of an answer so far; their tokens are all of its tokens but the first.

    So 1 + accepted / forwards is the tau of the answer.
    """
    row, forwards = progress.generation, []
    # The turn ends where a stop string has cut it; the engine's result may go on.
    for number, ids in forward_groups(progress.turn, 1):
        # The first token is prefill's (number 0) and left out; forward n's figures are at n - 1.
        copied = sum(len(part) for part, is_copied in copied_parts(row, number, ids) if is_copied)
        forwards.append(Forward(len(ids) - 1, row.proposed[number - 1], copied))
    return forwards


class Metrics(Collector):
    """Counts of one server.

    model: its name, the label of every figure. is_drafting: whether forwards verify drafts.
    grammars: returns the counts of structured outputs of each engine, as `Grammars` has them.
    """

    def __init__(self, model: str, is_drafting: bool = True):
        self._registry, self._model = CollectorRegistry(), model
        self._is_drafting = is_drafting
        self.grammars: Callable[[], list[Mapping[str, float]]] = list

        # How busy it is, and how long clients wait.
        self.running = self._figure(Gauge, "num_requests_running", "requests that are decoded")
        self.waiting = self._figure(Gauge, "num_requests_waiting", "requests that wait for a slot")
        self.first_token = self._seconds(
            "time_to_first_token", "until a stream's first token", _REQUEST_SECONDS
        )
        self._between = self._seconds(
            "inter_token_latency", "between two tokens of a stream", _TOKEN_SECONDS
        )
        self._whole = self._seconds(
            "e2e_request_latency", "until an answer's end", _REQUEST_SECONDS
        )

        # What was answered.
        self._prompt_tokens = self._figure(Counter, "prompt_tokens", "tokens of prompts")
        self._new_tokens = self._figure(Counter, "generation_tokens", "tokens of answers")
        self._ended = self._counter_by(
            "finished_reason", "request_success", "answers, by what ended them"
        )

        # Drafts: 1 + accepted / drafts is tau.
        drafts = "spec_decode_num_"
        self._drafts = self._figure(Counter, drafts + "drafts", "forwards that verified drafts")
        self._drafted = self._figure(Counter, drafts + "draft_tokens", "drafted tokens, verified")
        accepted = drafts + "accepted_tokens"
        self._accepted = self._figure(Counter, accepted, "tokens beyond one a forward")
        self._accepted_at = self._counter_by(
            "position", accepted + "_per_pos", "forwards that gave a token beyond one, by its place"
        )

        self._registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the figures that engines count."""
        engines = self.grammars()
        for name, help in _GRAMMARS.items():
            figure = CounterMetricFamily(f"{_OURS}grammar_{name}", help, labels=["model_name"])
            figure.add_metric([self._model], sum(counts[name] for counts in engines))
            yield figure

    def later_tokens(self, count: int, seconds: float) -> None:
        """Count more tokens of a stream, `seconds` after those before them."""
        # Tokens of one chunk come together: each gets an equal share of the time since the last.
        for _ in range(count):
            self._between.observe(seconds / count)

    def ended(self, progress: TurnProgress, seconds: float, is_own: bool = True) -> None:
        """Count an answer that has ended, `seconds` after its request.

        is_own: whether the server's own draft was used, not another to compare with.
        """
        turn = progress.turn
        self._whole.observe(seconds)
        self._ended.labels(self._model, FINISH_REASONS[turn.finish_reason or "stop"]).inc()
        self._prompt_tokens.inc(len(turn.prompt_ids))
        self._new_tokens.inc(len(turn.output_ids))

        # As the client got them, so that 1 + accepted / drafts is the tau of the rows.
        drafts = self._is_drafting and is_own
        forwards = forwards_of(progress) if drafts else []
        accepted = [forward.num_accepted for forward in forwards]
        self._drafts.inc(len(forwards))
        self._drafted.inc(sum(forward.num_drafted for forward in forwards))
        self._accepted.inc(sum(accepted))
        # As vLLM counts: position 0 is the first token beyond plain decoding's one.
        for position in range(max(accepted, default=0)):
            reached = sum(count > position for count in accepted)
            self._accepted_at.labels(self._model, str(position)).inc(reached)

    def aborted(self) -> None:
        self._ended.labels(self._model, "abort").inc()

    def totals(self) -> dict[str, Any]:
        """Return the sums for the end of a run; tau is None where nothing was drafted."""
        name = {"model_name": self._model}

        def total(figure: str) -> float:
            return self._registry.get_sample_value(_OURS + figure, name) or 0

        drafts = total("spec_decode_num_drafts_total")
        accepted = total("spec_decode_num_accepted_tokens_total")
        return {
            # Answers that were given up on have no latency.
            "answers": int(total("e2e_request_latency_seconds_count")),
            "prompt_tokens": int(total("prompt_tokens_total")),
            "tokens": int(total("generation_tokens_total")),
            "tau": round(1 + accepted / drafts, 4) if drafts else None,
        }

    def text(self) -> bytes:
        """Return all figures in the text format of Prometheus."""
        # Renamed in the text: two registered names would mean two counters for each figure.
        ours = generate_latest(self._registry).decode()
        return (ours + _NAME.sub(rf"\1{_THEIRS}", ours)).encode()

    def _figure(self, kind: type, name: str, help: str, **options: Any) -> Any:
        figure = kind(_OURS + name, help, ["model_name"], registry=self._registry, **options)
        return figure.labels(self._model)

    def _seconds(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        return self._figure(Histogram, f"{name}_seconds", help, buckets=bounds)

    def _counter_by(self, label: str, name: str, help: str) -> Counter:
        return Counter(_OURS + name, help, ["model_name", label], registry=self._registry)
