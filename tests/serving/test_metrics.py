"""What Prometheus reads agrees with the rows."""

import numpy as np
import pytest

from clover_jax.decoding.requests import Generation
from clover_jax.decoding.row_state import Turn, TurnProgress
from clover_jax.serving.metrics import Metrics


def ended(accepted, num_tokens, reason="length"):
    """Return the end of an answer that a limit cut after some tokens."""
    ids = list(range(num_tokens))
    row = Generation(
        0, [1, 2], ids, accepted=accepted, proposed=[5] * len(accepted), finish_reason=reason
    )
    turn = Turn([1, 2], ids, "", accepted, len(accepted), row.tau, 0.0, reason)
    return TurnProgress(turn, row, [], True, 0)


def figures(metrics):
    lines = metrics.text().decode().splitlines()
    return {n: float(v) for n, v in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_one_and_the_accepted_tokens_a_draft_are_tau():
    metrics = Metrics("m")
    rng = np.random.default_rng(0)
    tokens = forwards = 0
    for _ in range(50):
        accepted = rng.integers(0, 5, size=rng.integers(1, 9)).tolist()
        # EOS, a limit or a stop string cuts within the last forward.
        whole = 1 + sum(accepted) + len(accepted)
        kept = int(rng.integers(whole - accepted[-1], whole + 1))
        metrics.ended(ended(accepted, kept), 1.0)
        tokens, forwards = tokens + kept - 1, forwards + len(accepted)

    scraped = figures(metrics)
    label = '{model_name="m"}'
    for prefix in ("vllm:", "clover_jax_"):
        drafts = scraped[f"{prefix}spec_decode_num_drafts_total{label}"]
        taken = scraped[f"{prefix}spec_decode_num_accepted_tokens_total{label}"]
        assert drafts == forwards
        assert scraped[f"{prefix}spec_decode_num_draft_tokens_total{label}"] == 5 * forwards
        assert 1 + taken / drafts == pytest.approx(tokens / forwards, rel=1e-15)
        # Of the tokens that were accepted each has a place.
        name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
        assert sum(value for key, value in scraped.items() if key.startswith(name)) == taken
    assert metrics.totals()["tau"] == round(tokens / forwards, 4)


def test_a_prompt_of_prefill_s_token_alone_has_no_forwards():
    metrics = Metrics("m")
    metrics.ended(ended([], 1), 1.0)
    assert metrics.totals() == {"answers": 1, "prompt_tokens": 2, "tokens": 1, "tau": None}


def test_plain_decoding_drafts_nothing():
    metrics = Metrics("m", is_drafting=False)
    metrics.ended(ended([0, 0], 3), 1.0)
    assert metrics.totals()["tau"] is None


def test_a_name_of_ours_in_a_label_stays():
    text = Metrics("clover_jax_model").text().decode()
    assert 'vllm:num_requests_running{model_name="clover_jax_model"} 0.0' in text


def test_the_queue_is_asked_when_figures_are():
    metrics, waiting = Metrics("m"), [3]
    metrics.running.set_function(lambda: 2)
    metrics.waiting.set_function(lambda: waiting[0])
    waiting[0] = 4
    scraped = figures(metrics)
    assert scraped['vllm:num_requests_running{model_name="m"}'] == 2
    assert scraped['vllm:num_requests_waiting{model_name="m"}'] == 4


def test_endings_and_times_are_counted():
    metrics = Metrics("m")
    metrics.ended(ended([1], 3, "eos"), 1.0)
    metrics.ended(ended([1], 3, "stop"), 1.0)
    metrics.ended(ended([1], 3), 1.0)
    metrics.aborted()
    metrics.first_token.observe(0.2)
    metrics.later_tokens(4, 0.4)
    scraped = figures(metrics)
    reasons = {
        reason: scraped[f'vllm:request_success_total{{finished_reason="{reason}",model_name="m"}}']
        for reason in ("stop", "length", "abort")
    }
    assert reasons == {"stop": 2, "length": 1, "abort": 1}
    assert scraped['vllm:inter_token_latency_seconds_count{model_name="m"}'] == 4
    assert scraped['vllm:inter_token_latency_seconds_sum{model_name="m"}'] == pytest.approx(0.4)
    assert scraped['vllm:time_to_first_token_seconds_count{model_name="m"}'] == 1
