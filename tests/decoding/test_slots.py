"""Rows that join and leave while others decode."""

import jax
import numpy as np
import pytest

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Generation, Request
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import registry
from clover_jax.runtime.compile_clock import CompileClock
from tests.decoding.reference import _logits
from tests.tiny_models import TINY, decode_all, random_base, random_head, random_prompts


@pytest.fixture(scope="module")
def engine():
    rules = SamplingConfig("lossless", truncate=True)
    head = random_head()[0]
    tree = parse_tree("chain:3")
    return Engine(TINY, head, tree, rules, batch_size=2, prefill_size=32, adapts=True)


def opened(engine):
    return engine.open(random_base(), random_head()[1], CompileClock(), engine.buffer_size(300))


def finish(slots, slot):
    """Decode until the row in a slot has ended; return it."""
    row = Generation(0, [])
    while row.finish_reason is None:
        slots.read_prompts()
        for new in slots.advance():
            if new.slot == slot:
                row.add(new)
    return row


def generated(engine, prompt, new_tokens):
    """Decode a prompt alone, read from its beginning."""
    return decode_all(engine, random_base(), random_head()[1], [prompt], new_tokens)[0]


def test_others_decode_while_a_long_prompt_is_read(engine):
    slots, (short, long) = opened(engine), random_prompts(2, seed=5)
    first = slots.add(Request(0, short, 100))
    slots.read_prompts()
    late = slots.add(Request(1, long[:1] * 100, 5))
    steps = []
    while slots.num_reading:
        slots.read_prompts(1)
        steps.append([new.slot for new in slots.advance(1)])
    assert steps == [[first], [first], [first], [first, late]]  # 100 tokens are 4 chunks


def test_a_row_that_is_removed_leaves_its_slot_and_the_others_their_text(engine):
    slots, prompts = opened(engine), random_prompts(3, seed=6)
    kept, removed = (slots.add(Request(i, prompts[i], 60)) for i in range(2))
    slots.read_prompts()
    row = Generation(0, prompts[0])
    row.add(next(new for new in slots.advance(1) if new.slot == kept))
    slots.remove(removed)
    assert slots.add(Request(2, prompts[2], 60)) == removed
    slots.read_prompts()
    while row.finish_reason is None:
        for new in slots.advance(2):
            if new.slot == kept:
                row.add(new)
    assert row.output_ids == generated(engine, prompts[0], 60).output_ids


def test_tokens_taken_while_the_next_steps_run_are_the_same(engine):
    slots, prompts = opened(engine), random_prompts(5, seed=12)
    # The last two begin as others do, so they go on from what slots hold.
    prompts += [prompts[1] * 20, prompts[1] * 20]
    rows = [Generation(index, prompt) for index, prompt in enumerate(prompts)]
    waiting, running, begun = list(rows), {}, {}
    while waiting or running or begun:
        while waiting and slots.num_free:
            row = waiting.pop(0)
            running[slots.add(Request(row.index, row.prompt_ids, 20))] = row
        slots.read_prompts(1)
        slots.begin(2)
        for new in slots.take():
            begun[new.slot].add(new)
        begun = dict(running)
        for slot in slots.wait():
            del running[slot]
    for row in rows:
        alone = generated(engine, row.prompt_ids, 20)
        assert (row.output_ids, row.finish_reason) == (alone.output_ids, alone.finish_reason)
    assert [row.num_cached > 0 for row in rows] == [False] * 6 + [True]


def test_a_conversation_goes_on_from_what_its_slot_holds(engine, monkeypatch):
    slots, starts = opened(engine), []
    programs = slots.programs

    def noted(requests):
        real = programs(requests)

        def prefill(weights, row, start):
            starts.append(int(start))
            return real.prefill(weights, row, start)

        return real._replace(prefill=prefill)

    monkeypatch.setattr(slots, "programs", noted)
    first = np.random.default_rng(0).integers(0, 96, 70).tolist()
    answer = finish(slots, slots.add(Request(0, first, 60))).output_ids
    # Another row decodes meanwhile; what it leaves of an ended row's caches must be right.
    other = slots.add(Request(1, first[:40], 50))
    assert finish(slots, other).output_ids
    longer = [*first, *answer, 7, 8, 9]
    again = finish(slots, slots.add(Request(2, longer, 40)))
    assert starts == [0, 32, 64, 32, 96, 128]

    fresh = generated(engine, longer, 40)
    assert again.output_ids == fresh.output_ids
    assert again.accepted == fresh.accepted  # the head's own cache is as good as new


def test_a_head_that_learns_from_its_row_does_not_see_another_s():
    # Two chunks are the same in all prompts, and each prompt's own end follows.
    same = np.random.default_rng(1).integers(0, 96, 70).tolist()
    prompts = [same + end for end in random_prompts(3, seed=11)]
    head = registry.head(registry.config_for_base("recycle", TINY))
    engine = Engine(TINY, head, parse_tree("dynamic:9:3"), batch_size=1, prefill_size=32)
    together = decode_all(engine, random_base(), {}, prompts, 30)
    alone = [decode_all(engine, random_base(), {}, [prompt], 30)[0] for prompt in prompts]
    assert [row.accepted for row in together] == [row.accepted for row in alone]


def test_scores_are_the_log_probabilities_of_the_text(engine):
    slots, prompt = opened(engine), random_prompts(1, seed=9)[0]
    request = Request(0, prompt, 30, wants_scores=True, wants_prompt_scores=True)
    row = finish(slots, slots.add(request))
    text = np.array([*prompt, *row.output_ids])
    wanted = np.asarray(jax.nn.log_softmax(_logits(TINY, random_base(), text), axis=-1))

    scores = [*row.prompt_scores, *row.scores]
    assert len(scores) == len(text) - 1
    for position, score in enumerate(scores):
        own = wanted[position]
        assert score.log_probability == pytest.approx(own[text[position + 1]], abs=1e-4)
        assert score.top_log_probabilities == pytest.approx(np.sort(own)[:-21:-1], abs=1e-4)
        assert own[score.top_ids] == pytest.approx(score.top_log_probabilities, abs=1e-4)


def test_rows_without_a_temperature_run_the_cheaper_program(engine):
    assert engine.programs([Request(0, [1], 1)]) is not engine.programs(
        [Request(0, [1], 1, params=SamplingParams(temperature=1.0))]
    )
