"""Hit rates, accepted paths, draws, warping, and rows that change the base's logits."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding import accept
from clover_jax.decoding.accept import accept_typical
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import (
    AcceptedLengths,
    Request,
    least_sampling,
    requests_of_every_kind,
)
from clover_jax.decoding.sampling import TOKEN, RowSampling, draw, finite_log_softmax, gumbel, warp
from clover_jax.decoding.sampling_config import GREEDY, MOST_BIASED, SamplingConfig, SamplingParams
from clover_jax.decoding.step import StepConfig
from clover_jax.decoding.tree import TokenTree
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.drafter import PAD_TOKEN
from clover_jax.errors import UserError
from clover_jax.models import decoder
from clover_jax.models.decoder import largest, largest_in_parts, project
from tests.decoding.reference import _logits
from tests.tiny_models import (
    SMALL_TREE,
    TINY,
    decode,
    decoded,
    finished,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)

# Op by op, every operation on every shape would be compiled by itself.
accept_path = jax.jit(accept.accept_path)
accept_forced = jax.jit(accept.accept_forced, static_argnames="count")

# As a server has it.
MOST = SamplingConfig("lossless", truncate=True, biased=True, penalized=True)
CHANGES = (
    *({"params": SamplingParams(**params)} for params in ({"temperature": 1.0}, {"top_k": 5})),
    {"params": SamplingParams(temperature=1.0, top_k=5)},
    {"params": SamplingParams(temperature=1.0, top_p=0.5)},
    *({"params": SamplingParams(**p)} for p in ({"presence_penalty": 1.0}, {"min_p": 0.5})),
    {"params": SamplingParams(temperature=1.0, min_p=0.5)},
    {"wants_scores": True},
    {"wants_prompt_scores": True},
    {"min_new_tokens": 1},
    {"logit_bias": ((3, 1.0),)},
)


def tally(*answers):
    lengths = AcceptedLengths()
    for num_tokens, accepted in answers:
        lengths.add(num_tokens, accepted)
    return lengths


def test_tau_counts_what_is_left_after_the_cut_and_hit_rates_what_came_before_it():
    # 1 + (2+1) + (0+1) + (3+1) tokens, the last forward cut by one.
    lengths = tally((8, [2, 0, 3]))
    assert lengths.tau == pytest.approx(7 / 3)
    assert 1 + sum(lengths.hit_rate(3)) == pytest.approx(8 / 3)


def test_rates_of_several_answers_are_those_of_all_their_forwards():
    lengths = tally((9, [2, 0, 3]), (3, [1]))
    assert (lengths.tokens, lengths.forwards) == (12, 4)
    assert lengths.hit_rate(4) == [3 / 4, 2 / 4, 1 / 4, 0]
    assert lengths.conditional_hit_rate(4) == [3 / 4, 2 / 3, 1 / 2, 0]
    assert lengths.histogram() == [1, 1, 1, 1]
    assert lengths.histogram(1) == [1, 1]
    # Nothing decoded has no rates.
    lengths = tally((1, []))
    assert (lengths.tau, lengths.hit_rate(2), lengths.histogram()) == (None, [], [])
    assert lengths.conditional_hit_rate(2) == [None, None]


def test_accept_path_of_the_docstring_and_the_bonus_without_an_agreeing_child():
    tree = TokenTree(jnp.array([[5, 7, 8, 9]]), jnp.array([[-1, 0, 1, 0]]), depth=2)
    accepted = accept_path(tree, jnp.array([[7, 8, 4, 0]]))
    assert accepted.path.tolist() == [[0, 1, 2]]
    assert (accepted.count.tolist(), accepted.bonus.tolist()) == ([2], [4])
    tree = TokenTree(jnp.array([[5, 7, 9]]), jnp.array([[-1, 0, 0]]), depth=1)
    accepted = accept_path(tree, jnp.array([[3, 7, 9]]))
    assert (accepted.count.tolist(), accepted.bonus.tolist()) == ([0], [3])


@st.composite
def trees_with_argmax(draw, slots=10, vocabulary=4):
    """A tree whose siblings differ, and the base's argmax at every slot."""
    parent, tokens = [-1], [draw(st.integers(0, vocabulary - 1))]
    for slot in range(1, slots):
        above = draw(st.integers(0, slot - 1))
        taken = {tokens[s] for s in range(1, slot) if parent[s] == above}
        free = [token for token in range(vocabulary) if token not in taken]
        parent.append(above if free else 0)
        tokens.append(draw(st.sampled_from(free)) if free else PAD_TOKEN)
    best = draw(st.lists(st.integers(0, vocabulary - 1), min_size=slots, max_size=slots))
    return parent, tokens, best


@settings(deadline=None, max_examples=100)
@given(trees_with_argmax())
def test_the_accepted_path_is_the_walk_along_the_argmax(case):
    parent, tokens, best = case
    path = [0]
    while True:
        slot = path[-1]
        children = [s for s, p in enumerate(parent) if p == slot and tokens[s] == best[slot]]
        if not children:
            break
        path.append(children[0])
    tree = TokenTree(jnp.array([tokens]), jnp.array([parent]), depth=len(parent) - 1)
    accepted = accept_path(tree, jnp.array([best]))
    count = int(accepted.count[0])
    assert accepted.path[0, : count + 1].tolist() == path
    np.testing.assert_array_equal(accepted.path[0, count + 1 :], 0)
    assert int(accepted.bonus[0]) == best[path[-1]]


def test_forced_acceptance_takes_a_path_of_that_length_with_most_of_the_base_s_choices():
    tree = TokenTree(jnp.array([[5, 1, 2, 3, 0]]), jnp.array([[-1, 0, 0, 2, 1]]), depth=2)
    choices = jnp.array([[2, 9, 9, 4, 9]])
    forced = [accept_forced(tree, choices, count=count) for count in (0, 1, 2)]
    assert [accepted.count.tolist() for accepted in forced] == [[0], [1], [2]]
    assert forced[1].path[0, :2].tolist() == [0, 2]
    assert forced[2].path.tolist() == [[0, 2, 3]]
    assert (forced[0].bonus.tolist(), forced[2].bonus.tolist()) == ([2], [4])
    # Padding is never taken.
    tree = TokenTree(jnp.array([[5, PAD_TOKEN]]), jnp.array([[-1, 0]]), depth=1)
    assert accept_forced(tree, jnp.zeros((1, 2), int), count=1).count.tolist() == [0]


def test_parts_of_the_vocabulary_give_the_same_choices(monkeypatch):
    monkeypatch.setattr(decoder, "MOST_LOGITS", 1024)
    matrix = jax.random.normal(jax.random.key(0), (2500, 16))  # the last part is a shorter one
    hidden = jax.random.normal(jax.random.key(1), (3, 40, 16))
    found = largest_in_parts(matrix, hidden)
    assert found.shape == (3, 40)
    assert (found == largest(matrix, hidden)).all()
    assert len(set((found // 1024).ravel().tolist())) == 3  # every part wins somewhere
    # Of equal tokens the lowest is chosen.
    matrix = jnp.zeros((3000, 4)).at[jnp.array([7, 1030, 2900]), 0].set(1.0)
    hidden = jnp.zeros((5, 4)).at[:, 0].set(1.0)
    assert largest_in_parts(matrix, hidden).tolist() == [7] * 5


def test_there_is_a_request_of_every_kind_that_a_batch_can_be_of():
    kinds = {least_sampling(MOST, [request]) for request in requests_of_every_kind(4)}
    # A request has the params of its last change that has any, or the default ones.
    changed = [
        functools.reduce(operator.or_, changes, {})
        for count in range(len(CHANGES) + 1)
        for changes in itertools.combinations(CHANGES, count)
    ]
    asked = [Request(0, [0], 2, **changes) for changes in {repr(c): c for c in changed}.values()]
    alone = {least_sampling(MOST, [request]) for request in asked}
    beside = {least_sampling(MOST, pair) for pair in itertools.combinations(asked, 2)}
    assert alone | beside == kinds


LOSSLESS = SamplingConfig("lossless")

EOS = 7
BIASES = [((EOS, 30.0),), ((5, 2.5), (EOS, 30.0), (90, -4.0)), ((11, -100.0), (12, 3.0)), ()]
LEAST = [9, 14, 0, 6]


def rows(temperature, top_k=0, top_p=1.0):
    settings = (jnp.array([value]) for value in (temperature, top_k, top_p))
    return RowSampling(jnp.zeros((1, 2), jnp.uint32), *settings)


def warped_by_hand(logits, temperature, top_k, top_p):
    """Temperature, then top-k, then top-p, one token after another (Hugging Face's order)."""
    order = np.argsort(-logits, kind="stable")
    if top_k:
        order = order[:top_k]
    p = np.exp(logits[order] / temperature)
    p /= p.sum()
    kept = [token for i, token in enumerate(order) if p[:i].sum() < top_p]
    result = np.zeros_like(logits)
    result[kept] = np.exp(logits[kept] / temperature)
    return result / result.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.6), (50, 0.999)])
def test_warping_is_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32)
    warped = warp(jnp.asarray(logits)[None, None], rows(temperature, top_k, top_p), truncate=True)
    expected = warped_by_hand(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(jax.nn.softmax(warped)[0, 0], expected, atol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (0, 1e-7)])
def test_as_many_tokens_stay_where_a_compiler_computes_soft_caps_twice(top_k, top_p):
    temperatures = jnp.array([0.1, 0.3, 0.5, 0.7, 1.3, 2.1])
    cuts = {"top_k": jnp.full(6, top_k), "top_p": jnp.full(6, top_p)}
    many = RowSampling(key=jnp.zeros((6, 2), jnp.uint32), temperature=temperatures, **cuts)

    @jax.jit
    def num_kept(here, matrix, hidden, many):
        # A branch of a program, as prefill has it.
        def choose():
            warped = warp(project(matrix, hidden, 30.0), many, truncate=True)[:, 0]
            return draw(warped, many, jnp.zeros(6, jnp.int32)), (warped > -jnp.inf).sum(axis=-1)

        return jax.lax.cond(here, choose, lambda: (jnp.zeros(6, jnp.int32),) * 2)[1]

    for seed in range(3):
        matrix = jax.random.normal(jax.random.key(seed), (96, 64))
        hidden = jax.random.normal(jax.random.key(seed + 9), (6, 1, 64)) / 2
        np.testing.assert_array_equal(num_kept(True, matrix, hidden, many), [max(top_k, 1)] * 6)


@pytest.mark.parametrize("further", [0, 1], ids=["rounds up", "rounds down"])
def test_of_neighboring_numbers_the_smaller_is_cut(further):
    # What lies half-way between them rounds to one of the two.
    larger = -np.float32(5)
    for _ in range(further):
        larger = np.nextafter(larger, -np.inf, dtype=np.float32)
    logits = jnp.array([[[0, larger, np.nextafter(larger, -np.inf, dtype=np.float32)]]])
    warped = warp(logits, rows(1.0, top_k=2), truncate=True)
    np.testing.assert_array_equal(jnp.isfinite(warped)[0, 0], [1, 1, 0])


def test_temperature_zero_or_a_top_p_next_to_nothing_leaves_the_most_probable_token():
    logits = jnp.array([[[1.0, 3.0, 3.0, 2.0]]])
    np.testing.assert_array_equal(jnp.isfinite(warp(logits, rows(0.0), False))[0, 0], [0, 1, 0, 0])
    warped = warp(jnp.array([[[0.5, 2.0, 1.0]]]), rows(1.0, top_p=1e-50), truncate=True)
    np.testing.assert_array_equal(warped[0, 0], [-np.inf, 0.0, -np.inf])


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 5e-38])
@pytest.mark.parametrize("truncate", [False, True])
def test_a_tiny_temperature_draws_the_most_probable_token(temperature, truncate):
    def probability(logits):
        return jax.nn.softmax(warp(logits, rows(temperature), truncate))

    found = jax.jit(probability)(jnp.array([[[10.0, 29.0, 30.0, -3e4]]]))
    np.testing.assert_array_equal(found[0, 0], [0, 0, 1, 0])


def test_noise_depends_on_row_key_and_position_only():
    keys, cuts = jnp.array([[0, 1], [0, 2]], jnp.uint32), (jnp.zeros(2, jnp.int32), jnp.ones(2))
    settings = RowSampling(keys, jnp.ones(2), *cuts)
    noise = gumbel(settings, jnp.array([[5, 6], [6, 5]]), TOKEN, 4)
    swapped = jax.tree.map(lambda x: x[::-1], settings)
    again = gumbel(swapped, jnp.array([[5, 6], [6, 5]]), TOKEN, 4)
    np.testing.assert_array_equal(noise[0, 0], again[1, 1])
    np.testing.assert_array_equal(noise[1, 0], again[0, 1])
    assert len(np.unique(noise)) == noise.size


def sampled_texts(tree, sampling, head, batch_size):
    """Decode six prompts, greedy and hot rows mixed in one batch."""
    engine = Engine(TINY, head and head[0], tree, sampling, batch_size=batch_size)
    requests = [
        Request(i, prompt, 20, params=SamplingParams(0.7 * (i % 2), 30 * (i % 3)), seed=100 + i)
        for i, prompt in enumerate(random_prompts(6, seed=2))
    ]
    return texts_of(finished(engine.stream(random_base(), head and head[1], requests)))


TRUNCATED = SamplingConfig("lossless", truncate=True)


def test_with_deterministic_children_the_same_key_gives_the_text_of_plain_sampling():
    # Stronger than lossless: one draw per position, whatever was drafted.
    plain = sampled_texts(TreeConfig.root_only(), TRUNCATED, None, 3)
    assert sampled_texts(parse_tree("paper25"), TRUNCATED, random_head(), 4) == plain


@functools.cache
def texts_of_sampled_children(batch_size):
    sampling = SamplingConfig("lossless", "sampled", truncate=True)
    return sampled_texts(parse_tree("paper25"), sampling, random_head(), batch_size)


def test_sampled_children_give_a_row_the_same_text_in_any_batch_and_greedy_rows_plain_text():
    mixed = texts_of_sampled_children(4)
    assert texts_of_sampled_children(1) == mixed
    greedy = decoded(None, "none", random_prompts(6, seed=2), 20, batch_size=1)
    assert mixed[::2] == texts_of(greedy[::2])


def test_plain_decoding_draws_whatever_the_rule_for_drafts():
    drawn, typical = (
        sampled_texts(TreeConfig.root_only(), SamplingConfig(rule, truncate=True), None, 3)
        for rule in ("lossless", "typical")
    )
    assert typical == drawn


def test_typical_acceptance_follows_medusas_rule():
    p = np.array([[0.6, 0.3, 0.1], [0.05, 0.05, 0.9], [0.2, 0.5, 0.3], [1 / 3] * 3], np.float32)
    tree = TokenTree(jnp.array([[0, 1, 0, 2]]), jnp.array([[-1, 0, 0, 1]]), depth=2)
    entropy = -(p * np.log(p + 1e-5)).sum(-1)
    threshold = np.minimum(0.09, 0.3 * np.exp(-entropy))
    assert p[0, 1] > threshold[0]
    assert p[1, 2] > threshold[1]
    accept = jax.jit(accept_typical)
    accepted = accept(tree, finite_log_softmax(jnp.log(p))[None], 0.09, 0.3)
    assert accepted.path.tolist() == [[0, 1, 3]]
    # Between paths of one length the more probable wins: slot 2 has p = 0.6, slot 1 has 0.3.
    shallow = TokenTree(jnp.array([[0, 1, 0]]), jnp.array([[-1, 0, 0]]), depth=1)
    accepted = accept(shallow, finite_log_softmax(jnp.log(p[:3]))[None], 0.09, 0.3)
    assert accepted.path.tolist() == [[0, 2]]
    assert accepted.bonus.tolist() == [1]


@pytest.mark.parametrize(
    ("request_", "sampling", "message"),
    [
        ({"params": SamplingParams(temperature=0.5)}, SamplingConfig(), "needs --verify=lossless"),
        ({"params": SamplingParams(top_k=5)}, LOSSLESS, r"need an engine with .*truncate=True"),
        ({"seed": 2**32}, LOSSLESS, r"seed \(4294967296\) must lie in 0 .. 4294967295"),
    ],
)
def test_a_request_that_the_rules_do_not_allow_is_refused(request_, sampling, message):
    engine = Engine(TINY, None, TreeConfig.root_only(), sampling)
    with pytest.raises(UserError, match=message):
        engine.check(Request(0, [1], 5, **request_))
    with pytest.raises(UserError, match="must lie in 0"):
        Engine(TINY, None, TreeConfig.root_only(), seed=2**32)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, r"temperature \(-1.0\) must be 0 or more"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be 0 or more"),
        ({"temperature": 1e39}, r"temperature \(1e\+39\) must be 3.40282e\+38 or less"),
        ({"top_p": 0.0}, r"top_p \(0.0\) must lie in"),
        ({"top_k": -2}, r"top_k \(-2\) must be 1 or more"),
        ({"min_p": 1.5}, r"min_p \(1.5\) must lie in 0 .. 1"),
        ({"min_p": float("nan")}, r"min_p \(nan\) must lie in 0 .. 1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty \(0.0\) must lie in 0.01 .. 100"),
        ({"frequency_penalty": 2.5}, r"frequency_penalty \(2.5\) must lie in -2 .. 2"),
        ({"presence_penalty": -3.0}, r"presence_penalty \(-3.0\) must lie in -2 .. 2"),
    ],
)
def test_params_that_cannot_be_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**params)


def test_what_cannot_be_drawn_is_refused():
    gapped, wide = TreeConfig("gapped", ((0,), (2,))), TreeConfig("wide", ((96,),))
    with pytest.raises(ValueError, match="needs the children 0"):
        StepConfig(TINY, random_head()[0], gapped, SamplingConfig("lossless", "sampled"))
    with pytest.raises(ValueError, match="97 children of a node and the draft's vocabulary has 96"):
        StepConfig(TINY, random_head()[0], wide)
    with pytest.raises(ValueError, match="'sampled' needs verify 'lossless'"):
        SamplingConfig("typical", "sampled")


def test_more_children_than_the_usual_support_can_be_sampled():
    wide = TreeConfig("wide", (*((i,) for i in range(20)), (0, 0)))
    sampling = SamplingConfig("lossless", "sampled", truncate=True)
    assert len(sampled_texts(wide, sampling, random_head(), 2)) == 6


def requests(**changes):
    """Four rows with a bias each, whose EOS is probable, and one without."""
    prompts = random_prompts(5, seed=3)
    rows = zip(prompts, [*BIASES, ()], [*LEAST, 0], strict=True)
    return [
        Request(i, prompt, 20, (EOS,), min_new_tokens=least, logit_bias=bias, **changes)
        for i, (prompt, bias, least) in enumerate(rows)
    ]


def slow(request):
    """Return the argmax of biased logits, one full forward a token."""
    text, new = list(request.prompt_ids), []
    while len(new) < request.max_new_tokens and EOS not in new:
        logits = np.array(_logits(TINY, random_base(), text)[len(text) - 1])
        for id_, bias in request.logit_bias:
            logits[id_] += bias
        if len(new) < request.min_new_tokens:
            logits[EOS] = -np.inf
        new.append(int(logits.argmax()))
        text.append(new[-1])
    return new


@pytest.mark.parametrize("rules", ["greedy", pytest.param("lossless", marks=pytest.mark.slow)])
def test_greedy_text_is_the_argmax_of_biased_logits(rules):
    sampling = SamplingConfig(rules, biased=True)
    engine = Engine(TINY, random_head()[0], SMALL_TREE, sampling, batch_size=3)
    rows = decode(engine, requests())
    assert texts_of(rows) == [slow(request) for request in requests()]
    # The first EOS stands where it may, right behind the least length.
    assert [len(row.output_ids) for row in rows[:2]] == [10, 15]
    assert [row.finish_reason for row in rows[:2]] == ["eos", "eos"]
    assert sum(sum(row.accepted) for row in rows) > 0


@pytest.mark.parametrize(
    "tree", ["chain:3", pytest.param("dynamic:5:3:3+copy:4", marks=pytest.mark.slow)]
)
def test_drawn_text_is_plain_decoding_s(tree):
    sampling = SamplingConfig("lossless", truncate=True, biased=True)
    asked = requests(params=SamplingParams(temperature=1.0, top_p=0.9))
    plain = Engine(TINY, None, TreeConfig.root_only(), sampling, batch_size=5)
    engine = Engine(TINY, random_head()[0], parse_tree(tree), sampling, batch_size=2)
    texts = texts_of(decode(engine, asked))
    assert texts == texts_of(decode(plain, asked))
    assert all(EOS not in text[:least] for text, least in zip(texts, LEAST, strict=False))
    assert 11 not in texts[2]


def test_rows_without_a_bias_run_the_programs_of_an_engine_without(chunks):
    texts, head = [], random_head()[0]
    for biased in (False, True):
        sampling = SamplingConfig("lossless", biased=biased)
        engine = Engine(TINY, head, parse_tree("chain:3"), sampling, adapts=True, batch_size=2)
        texts.append(texts_of(decode(engine, requests()[4:])))
    assert texts[0] == texts[1]
    assert len({one.config.sampling for one in chunks}) == len(set(chunks)) == 1
    assert chunks[0].config.sampling == GREEDY
    # Beside a row with a bias it has the same text by the other program.
    assert decode(engine, requests())[4].output_ids == texts[0][0]
    assert any(one.config.sampling.biased for one in chunks)


def test_scores_are_those_of_the_base_itself():
    sampling = SamplingConfig("lossless", biased=True)
    engine = Engine(TINY, None, TreeConfig.root_only(), sampling, adapts=True)
    prompt = random_prompts(1, seed=9)[0]
    (row,) = decode(engine, [Request(0, prompt, 3, logit_bias=((5, 90.0),), wants_scores=True)])
    assert row.output_ids == [5, 5, 5]
    logits = np.asarray(_logits(TINY, random_base(), [*prompt, 5, 5]))[len(prompt) - 1 :][:3]
    wanted = np.asarray(jax.nn.log_softmax(logits, axis=-1))[:, 5]
    given = [score.log_probability for score in row.scores]
    assert given == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (((96, 1.0),), r"logit_bias: token ids must lie in 0 \.\. 95, not 96"),
        (((5, float("inf")),), "logit_bias: inf of token 5 is not finite"),
        (((5, 1.0),) * (MOST_BIASED + 1), "logit_bias: 301 tokens; at most 300"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias, said):
    engine = Engine(TINY, None, TreeConfig.root_only(), SamplingConfig(biased=True))
    with pytest.raises(UserError, match=said):
        engine.check(Request(0, [1], 5, logit_bias=bias))
    with pytest.raises(UserError, match="need an engine with"):
        Engine(TINY, None, TreeConfig.root_only()).check(Request(0, [1], 5, min_new_tokens=1))
