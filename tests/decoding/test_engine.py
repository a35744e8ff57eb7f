"""Requests through the engine, and rows that join and leave its slots."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Generation, Request
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.decoding.state import bucket
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.runtime.compile_clock import CompileClock
from tests.decoding.reference import _logits
from tests.decoding.test_greedy_equality import HYBRID
from tests.tiny_models import (
    SMALL_TREE,
    TINY,
    decode_all,
    decoded,
    finished,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)


@pytest.fixture(scope="module")
def engine():
    return Engine(TINY, random_head()[0], parse_tree("chain:3"), batch_size=2)


def generate(engine, prompts, new_tokens=12, eos_ids=()):
    return decode_all(engine, random_base(), random_head()[1], prompts, new_tokens, eos_ids)


def test_a_row_decodes_alone_as_in_a_batch(engine):
    prompts = random_prompts(5, seed=3)
    alone = [generate(engine, [prompt])[0].output_ids for prompt in prompts]
    assert texts_of(generate(engine, prompts)) == alone


def test_counts_add_up_without_a_cut(engine):
    (row,) = generate(engine, random_prompts(1), new_tokens=30)
    uncut = 1 + sum(accepted + 1 for accepted in row.accepted)
    assert 30 == len(row.output_ids) <= uncut < 30 + 4
    assert row.tau == pytest.approx(29 / len(row.accepted))
    assert row.proposed == [3] * len(row.accepted)
    assert row.ranks == [[0] * accepted for accepted in row.accepted]  # a chain has no siblings
    assert row.finish_reason == "length"


def test_eos_ends_a_row_and_is_emitted_and_needs_no_forward_as_first_token(engine):
    prompt = random_prompts(1, seed=5)[0]
    text = generate(engine, [prompt], 20)[0].output_ids
    position = next(i for i in range(3, 20) if text[i] not in text[:i])
    (row,) = generate(engine, [prompt], 20, eos_ids=(text[position], 95))
    assert row.output_ids == text[: position + 1]
    assert row.finish_reason == "eos"
    first = generate(engine, [prompt], 1)[0]
    assert (len(first.output_ids), first.accepted, first.tau) == (1, [], None)
    (row,) = generate(engine, [prompt], 20, eos_ids=first.output_ids)
    assert (row.output_ids, row.finish_reason) == (first.output_ids, "eos")


def test_the_context_bounds_prompt_and_emitted_tokens(engine):
    context = TINY.max_position_embeddings
    prompt = np.random.default_rng(0).integers(0, 96, context - 5).tolist()
    (row,) = generate(engine, [prompt], 100)
    assert (len(row.output_ids), row.finish_reason) == (5, "length")


def test_a_longer_request_grows_the_buffers_and_keeps_the_other_rows(engine):
    short, long = random_prompts(2, seed=8)[0], random_prompts(1, seed=9)[0] * 300
    requests = [Request(0, short, 60), Request(1, short, 2), Request(2, long[:400], 20)]
    stream = engine.stream(random_base(), random_head()[1], requests)
    rows = {p.row.index: p.row for p in stream if p.done}
    assert rows[0].output_ids == generate(engine, [short], 60)[0].output_ids
    assert rows[2].output_ids == generate(engine, [long[:400]], 20)[0].output_ids


def test_pieces_join_to_the_whole_text(engine):
    requests = [Request(i, p, 30) for i, p in enumerate(random_prompts(3, seed=4))]
    pieces = {0: [], 1: [], 2: []}
    for progress in engine.stream(random_base(), random_head()[1], requests):
        pieces[progress.row.index] += progress.new_ids
        if progress.done:
            assert pieces[progress.row.index] == progress.row.output_ids


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, [], 5), "no tokens"),
        (Request(0, [1] * 1024, 5), "1024 tokens and the base's context is 1024"),
        (Request(0, [96], 5), r"must lie in 0 .. 95"),
        (Request(0, [1], 0), r"max_new_tokens \(0\) must be at least 1"),
        (Request(0, [1], 1, eos_ids=range(9)), "9 EOS tokens; at most 8"),
    ],
)
def test_an_impossible_request_says_what_is_wrong(engine, request_, message):
    with pytest.raises(UserError, match=message):
        list(engine.stream(random_base(), random_head()[1], [request_]))


def test_a_tree_needs_a_head_and_a_head_a_tree():
    for head, tree in ((None, "paper25"), (random_head()[0], "none")):
        with pytest.raises(UserError, match="nodes need a head"):
            Engine(TINY, head, parse_tree(tree))


def test_a_buffer_may_be_exactly_full(engine):
    prompt = random_prompts(1, seed=12)[0][:1] * 200
    whole = 256 - 200 - engine.config.tree.depth  # limit + depth fills the first bucket
    rows = [generate(engine, [prompt], tokens)[0] for tokens in (whole, whole + 1)]
    assert rows[0].output_ids == rows[1].output_ids[:-1]


def test_bfloat16_weights_decode_as_plainly():
    params, (head, draft_params) = random_base(), random_head()
    params, draft_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, draft_params))
    prompts, how = random_prompts(2, seed=21), {"base": params, "batch_size": 2}
    speculative = decoded((head, draft_params), "chain:3", prompts, 20, **how)
    assert texts_of(speculative) == texts_of(decoded(None, "none", prompts, 20, **how))


def test_buckets_are_powers_of_two_times_the_cache_chunk_up_to_what_the_context_asks_for():
    assert [bucket(n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]
    assert [bucket(n, 8197) for n in (4096, 4097, 8193)] == [4096, 8192, 10240]
    assert [bucket(n, 40965) for n in (32768, 40000)] == [32768, 49152]
    assert [bucket(n, 133) for n in (5, 133)] == [256, 256]
    assert bucket(1500, 2048) == 2048


def test_a_full_context_decodes_in_its_own_bucket():
    (head, draft_params), context = random_head(), TINY.max_position_embeddings
    prompt = np.random.default_rng(4).integers(0, TINY.vocab_size, context - 24).tolist()
    engines = Engine(TINY, head, parse_tree("chain:3")), Engine(TINY, None, TreeConfig.root_only())
    assert [engine.buffer_size(context) for engine in engines] == [1280, 1024]
    rows = [decode_all(e, random_base(), draft_params, [prompt], 50)[0] for e in engines]
    assert rows[0].output_ids == rows[1].output_ids
    assert len(rows[0].output_ids) == 24


def test_a_stopped_row_frees_its_slot_and_leaves_the_others_alone(engine):
    requests = [Request(i, p, 40) for i, p in enumerate(random_prompts(4, seed=6))]
    stopped, rows = [], {}
    for progress in engine.stream(random_base(), random_head()[1], requests):
        assert progress.row.index not in stopped
        if progress.row.index in (0, 2):
            progress.stop()
            stopped.append(progress.row.index)
            assert progress.row.finish_reason == "stop"
        elif progress.done:
            rows[progress.row.index] = progress.row.output_ids
    assert stopped == [0, 2]
    prompts = [requests[i].prompt_ids for i in (1, 3)]
    assert [rows[1], rows[3]] == texts_of(generate(engine, prompts, 40))


def test_a_source_that_has_nothing_yet_is_asked_again(engine):
    first, second = random_prompts(2, seed=7)
    answers, waiting = [], [Request(0, first, 6)]

    def source():
        while True:
            yield waiting.pop() if waiting else None

    for progress in engine.stream(random_base(), random_head()[1], source()):
        if progress.done:
            answers.append(progress.row.output_ids)
            if len(answers) == 1:
                waiting.append(Request(1, second + answers[0], 6))
    expected = generate(engine, [second + answers[0]], 6)[0].output_ids
    assert answers[1:] == [expected]


def test_compilation_is_not_part_of_a_rows_time(monkeypatch):
    # A clock of our own, 10 seconds later at every look: programs take no time by it.
    looks = itertools.count(0, 10)
    monkeypatch.setattr(CompileClock, "now", lambda clock: next(looks))
    engine = Engine(TINY, None, TreeConfig.root_only())
    (row,) = decode_all(engine, random_base(), None, [[1, 2]], 4)
    # The first look is when the row came, the last one before the next when it ended.
    assert 0 < row.seconds == next(looks) - 10


@pytest.fixture(scope="module")
def sampling_engine():
    given = random_head()[0], parse_tree("chain:3"), SamplingConfig("lossless", truncate=True)
    return Engine(TINY, *given, batch_size=2, prefill_size=32, adapts=True)


def opened(sampling_engine):
    return sampling_engine.open(
        random_base(), random_head()[1], CompileClock(), sampling_engine.buffer_size(300)
    )


def finish(slots, slot):
    """Decode until the row in a slot has ended; return it."""
    row = Generation(0, [])
    while row.finish_reason is None:
        slots.read_prompts()
        for new in slots.advance():
            if new.slot == slot:
                row.add(new)
    return row


def generated(sampling_engine, prompt, new_tokens):
    """Decode a prompt alone, read from its beginning."""
    return decode_all(sampling_engine, random_base(), random_head()[1], [prompt], new_tokens)[0]


def test_others_decode_while_a_long_prompt_is_read(sampling_engine):
    slots, (short, long) = opened(sampling_engine), random_prompts(2, seed=5)
    first = slots.add(Request(0, short, 100))
    slots.read_prompts()
    late = slots.add(Request(1, long[:1] * 100, 5))
    steps = []
    while slots.num_reading:
        slots.read_prompts(1)
        steps.append([new.slot for new in slots.advance(1)])
    assert steps == [[first], [first], [first], [first, late]]  # 100 tokens are 4 chunks


def test_a_row_that_is_removed_leaves_its_slot_and_the_others_their_text(sampling_engine):
    slots, prompts = opened(sampling_engine), random_prompts(3, seed=6)
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
    assert row.output_ids == generated(sampling_engine, prompts[0], 60).output_ids


def test_tokens_taken_while_the_next_steps_run_are_the_same(sampling_engine):
    slots, prompts = opened(sampling_engine), random_prompts(5, seed=12)
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
        alone = generated(sampling_engine, row.prompt_ids, 20)
        assert (row.output_ids, row.finish_reason) == (alone.output_ids, alone.finish_reason)
    assert [row.num_cached > 0 for row in rows] == [False] * 6 + [True]


def test_a_conversation_goes_on_from_what_its_slot_holds(sampling_engine, monkeypatch):
    slots, starts = opened(sampling_engine), []
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

    fresh = generated(sampling_engine, longer, 40)
    assert again.output_ids == fresh.output_ids
    assert again.accepted == fresh.accepted  # the head's own cache is as good as new


def test_a_prompt_begins_at_a_snapshot_of_delta_nets():
    """A slot's state is that after its whole text; snapshots lie at ends of chunks of 32 tokens.

    One is where a prompt left another's, one where the next turn will leave its own: at 64 of 70.
    """
    base = dataclasses.replace(TINY, num_layers=2, **HYBRID)
    drafter = random_head(base)
    first = np.random.default_rng(0).integers(0, 96, 70).tolist()
    edited = [[*first[:50], *first[60:]], [*first[:40], *first[50:]]]
    prompts = [first, first[:40], [*first, 7, 8, 9], first, *edited, first]
    together = Engine(base, drafter[0], SMALL_TREE, batch_size=2, prefill_size=32)
    alone = Engine(base, drafter[0], SMALL_TREE, batch_size=1)

    # Rows end by a limit or within an accepted path, and their slots are used again.
    texts = texts_of(decode_all(alone, random_base(base), drafter[1], prompts, 40))
    eos = (texts[0][9],)
    rooms = (40, 5, 33, 1, 17, 24, 20)
    requests = [
        Request(index, prompt, room, eos, shares_prompt=index == 6)
        for index, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
    ]
    rows = finished(together.stream(random_base(base), drafter[1], requests))
    for row, text, room in zip(rows, texts, rooms, strict=True):
        end = next((i + 1 for i, token in enumerate(text) if token in eos), room)
        assert row.output_ids == text[: min(end, room)]
    # The second shares 32 tokens, of which there is no snapshot, and so does the first edited one;
    # the second edited one leaves the text where that did.
    assert [row.num_cached for row in rows] == [0, 0, 64, 64, 0, 32, 64]


def test_a_head_that_learns_from_its_row_does_not_see_another_s():
    # Two chunks are the same in all prompts, and each prompt's own end follows.
    same = np.random.default_rng(1).integers(0, 96, 70).tolist()
    prompts = [same + end for end in random_prompts(3, seed=11)]
    head = registry.head(registry.config_for_base("recycle", TINY))
    sampling_engine = Engine(TINY, head, parse_tree("dynamic:9:3"), batch_size=1, prefill_size=32)
    together = decode_all(sampling_engine, random_base(), {}, prompts, 30)
    alone = [decode_all(sampling_engine, random_base(), {}, [prompt], 30)[0] for prompt in prompts]
    assert [row.accepted for row in together] == [row.accepted for row in alone]


def test_scores_are_the_log_probabilities_of_the_text(sampling_engine):
    slots, prompt = opened(sampling_engine), random_prompts(1, seed=9)[0]
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


def test_rows_without_a_temperature_run_the_cheaper_program(sampling_engine):
    hot = Request(0, [1], 1, params=SamplingParams(temperature=1.0))
    assert sampling_engine.programs([Request(0, [1], 1)]) is not sampling_engine.programs([hot])
