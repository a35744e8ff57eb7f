"""The first four generated tokens are distributed as plain sampling's: chi-square tests.

20 000 rows with keys of their own decode the same prompt in one compiled program; the exact
distribution comes from full forwards over every possible text.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from clover_jax.config import BaseConfig, DeltaConfig
from clover_jax.decoding import accept, step
from clover_jax.decoding.grammars import Grammars, fill_masks, form_text
from clover_jax.decoding.prefill import prefill_chunk
from clover_jax.decoding.sampling import RowBias, RowPenalties, RowSampling
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights, speculate_and_verify
from clover_jax.decoding.tree_config import CopyTree, parse_tree
from clover_jax.drafters.drafter import with_draft_rows
from clover_jax.models.decoder import Decoder, base_logits, causal_mask
from tests.layer_heads import KINDS, lively_head
from tests.tiny_models import DRAFTERS, SMALL_TREE, TRAINING_FREE, random_base, random_head

WIDTHS = {"vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
BASE = BaseConfig(**WIDTHS, num_layers=1, num_heads=2, num_kv_heads=1)
PROMPT = (1, 3, 0)
SAMPLES, LENGTH = 20_000, 4
PENALTIES, MIN_P = (1.5, 0.8, 0.5), 0.1  # repetition, frequency, presence
BIAS, EOS = np.array([0.7, -1.0, 0.3, 0.0, 1.5], np.float32), 4


@functools.cache
def peaked_params(base=BASE):
    """Logits spread over several units, so that acceptance and residuals matter."""
    params = dict(random_base(base))
    return {**params, "lm_head": params["lm_head"] * 40}


@functools.cache
def exact(temperature, top_p, biased=False, base=BASE, penalized=False, masked=False) -> np.ndarray:
    """Return the probability of every text of LENGTH tokens, [V] * LENGTH.

    biased: with BIAS, and without EOS before the last token. penalized: with PENALTIES and MIN_P.
    masked: of FORM.
    """
    texts = np.array(list(itertools.product(range(5), repeat=LENGTH)))
    tokens = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    params = peaked_params(base)

    @jax.jit
    def forward(params, tokens, positions):
        mask = causal_mask(*tokens.shape)
        output = Decoder(base).apply({"params": params}, tokens, positions, mask)
        return base_logits(base, params, output.hidden["post_norm"])

    logits = np.asarray(forward(params, tokens, positions))
    probability = np.ones(len(texts))
    for i in range(LENGTH):
        here = logits[:, len(PROMPT) - 1 + i].astype(np.float64)
        if biased:
            here = here + BIAS
            here[:, EOS] = -np.inf if i < LENGTH - 1 else here[:, EOS]
        if penalized:
            answered = (texts[:, :i, None] == np.arange(5)).sum(1)
            is_there = (answered > 0) | np.isin(np.arange(5), PROMPT)
            repetition, frequency, presence = PENALTIES
            repeated = np.where(here > 0, here / repetition, here * repetition)
            here = np.where(is_there, repeated, here)
            here = here - frequency * answered - presence * (answered > 0)
        if masked:
            # Texts that have left the form before have the probability 0 whatever comes.
            here = np.where([allowed(tuple(text[:i])) for text in texts], here, -1e9)
        p = np.exp((here - here.max(-1, keepdims=True)) / temperature)
        p /= p.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1)
        ranked = np.take_along_axis(p, order, -1)
        ranked[np.cumsum(ranked, -1) - ranked >= top_p] = 0
        np.put_along_axis(p, order, ranked, -1)
        if penalized:
            p[p < MIN_P * p.max(-1, keepdims=True)] = 0
        p /= p.sum(-1, keepdims=True)
        probability *= p[np.arange(len(texts)), texts[:, i]]
    return probability


def sample(
    tree,
    draft_sampling,
    temperature,
    top_p,
    drafter="clover2",
    biased=False,
    base=BASE,
    penalized=False,
    masked=False,
):
    """Return SAMPLES texts of LENGTH tokens, decoded speculatively.

    drafter: one of DRAFTERS, or a head and its params.
    """
    drafter = random_head(base, drafter) if isinstance(drafter, str) else drafter
    head, draft_params = drafter if tree.num_nodes else (None, {})
    rules = {"truncate": top_p < 1, "biased": biased, "penalized": penalized, "masked": masked}
    sampling = SamplingConfig("lossless", draft_sampling, **rules)
    config = StepConfig(base, head, tree, sampling)
    base_params = peaked_params(base)
    base_params = with_draft_rows(base_params, head.config) if head else base_params
    weights = Weights(base_params, draft_params)
    keys, start = jax.random.split(jax.random.key(7), SAMPLES), len(PROMPT)
    ids, values = (jnp.tile(row, (SAMPLES, 1)) for row in (jnp.arange(5), BIAS))
    bias = RowBias(ids=ids, values=values, eos_from=jnp.full(SAMPLES, start + LENGTH - 1))
    warped = {"temperature": jnp.full(SAMPLES, temperature), "top_p": jnp.full(SAMPLES, top_p)}
    warped |= {"top_k": jnp.zeros(SAMPLES, jnp.int32), "bias": bias if biased else None}
    if penalized:
        amounts = (jnp.full(SAMPLES, value) for value in (*PENALTIES, MIN_P))
        warped["penalties"] = RowPenalties(jnp.full(SAMPLES, start), *amounts)
    rows = RowSampling(key=jax.random.key_data(keys), **warped)
    end = jnp.full(SAMPLES, start, jnp.int32)  # a weak type would compile the step twice
    state = empty_state(base, head, tree, SAMPLES, 16, 1, jnp.float32)
    tokens = state.tokens.at[:, :start].set(jnp.array(PROMPT))
    ends = {"end": end, "limit": end + LENGTH, "eos": state.eos + (1 + EOS if biased else 0)}
    state = state.replace(tokens=tokens, sampling=rows, **ends)
    # The state is an argument: as a constant, XLA would spend a minute folding it.
    masks = [np.tile(mask_after(()), (SAMPLES, 1, 1))] if masked else []
    state = jax.jit(prefill_chunk, static_argnums=(0, 1))(config, 4, weights, state, 0, *masks)[0]
    # A function of its own, traced anew: a test may have put a fault into the verifier.
    compiled = (
        masked_step(config) if masked else jax.jit(functools.partial(speculate_and_verify, config))
    )
    most_accepted = 0
    for _ in range(LENGTH - 1):
        state, record = compiled(weights, state)
        most_accepted = max(most_accepted, int(record.accepted.max()))
    # How much the text repeats decides how deep copies get, and all that is not trained.
    repeats = isinstance(tree, CopyTree) or (head and head.config.kind in TRAINING_FREE)
    assert most_accepted >= (1 if repeats else min(tree.depth, 3))
    return np.asarray(state.tokens[:, start : start + LENGTH])


# Tokens of the masked texts, the end of a text last, and a form that no text of LENGTH ends.
SYMBOLS = ("a", "b", "c", "ab", "</s>")
FORM = form_text({"regex": "([ab][abc]){4,12}"})


@functools.cache
def forms():
    vocabulary = {symbol: id_ for id_, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SYMBOLS[EOS])
    return Grammars(fast, len(SYMBOLS), (EOS,))


@functools.cache
def mask_after(text):
    """Return the mask of what may follow a text, and all tokens where none may."""
    matcher = forms().matcher(FORM)
    if matcher.try_consume_tokens(list(text)) < len(text):
        return np.full(1, -1, np.int32)
    return np.frombuffer(matcher.compute_bitmask(), np.int32)


def allowed(text):
    return (mask_after(text)[0] >> np.arange(5) & 1).astype(bool)


def masked_step(config):
    """Return a step whose masks the host fills, as `programs.compile_masked_step` has it."""
    draft, verify, end_stage = (
        jax.jit(functools.partial(stage, config))
        for stage in (step.draft, step.verify_tree, step.accept_and_commit)
    )

    @functools.cache
    def masks_of(text, tokens, parent):
        matcher, masks = forms().matcher(FORM), np.full((len(tokens), 1), -1, np.int32)
        assert matcher.consume_tokens(list(text))
        fill_masks(matcher, tokens, parent, masks, (EOS,))
        return masks

    def run(weights, state):
        state, drafted = draft(weights, state)
        verified = verify(weights, state, drafted.tree)
        tokens, parent, texts, ends = jax.device_get(
            (drafted.tree.tokens, drafted.tree.parent, state.tokens, state.end)
        )
        rows = zip(tokens, np.broadcast_to(parent, tokens.shape), texts, ends, strict=True)
        # Rows that have their tokens write no more.
        done = len(PROMPT) + LENGTH
        masks = [
            np.full((tokens.shape[1], 1), -1, np.int32)
            if end >= done
            else masks_of(tuple(text[len(PROMPT) : end].tolist()), tuple(tree), tuple(above))
            for tree, above, text, end in rows
        ]
        return end_stage(weights, state, drafted, verified, np.stack(masks))

    return run


def p_value(texts: np.ndarray, probability: np.ndarray) -> float:
    """Return the chi-square test's p-value; rare texts (fewer than 5 expected) are pooled."""
    index = np.ravel_multi_index(texts.T, (5,) * LENGTH)
    observed = np.bincount(index, minlength=5**LENGTH)
    assert observed[probability == 0].sum() == 0
    expected = probability * len(texts)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    return stats.chisquare(observed[possible], expected[possible]).pvalue


TREES = {"none": parse_tree("none"), "chain:3": parse_tree("chain:3"), "small": SMALL_TREE}
TREES |= {"copy:6": parse_tree("copy:6"), "small+copy:4": CopyTree("small+copy:4", SMALL_TREE, 4)}
TREES |= {"dynamic:5:3:3+copy:4": parse_tree("dynamic:5:3:3+copy:4")}
# Temperature and top_p; penalties leave too few texts of CUT.
HOT, CUT, WARM = (1.0, 1.0), (0.7, 0.9), (2.0, 0.95)
USUAL = [  # the others of the product are slow
    ("clover2", "none", "topk", CUT),
    ("clover2", "small", "sampled", CUT),
    ("dflash2", "small", "sampled", CUT),  # of three candidates
    ("medusa", "chain:3", "topk", CUT),
    ("lookup", "copy:6", "topk", CUT),
]
PRODUCT = [
    ("clover2", "none", "topk", HOT),
    *itertools.product(DRAFTERS, ["chain:3", "small"], ["topk", "sampled"], [HOT, CUT]),
    *itertools.product(DRAFTERS, ["small+copy:4", "dynamic:5:3:3+copy:4"], ["topk"], [HOT, CUT]),
    *itertools.product(TRAINING_FREE, ["chain:3", "small", "copy:6"], ["topk"], [HOT, CUT]),
]
ACCELERATOR = USUAL[1]


def marked(case):
    marks = [pytest.mark.accelerator] if case == ACCELERATOR else []
    marks += [] if case in USUAL else [pytest.mark.slow]
    return pytest.param(*case, id="-".join(map(str, case)), marks=marks)


CASES = [marked(case) for case in dict.fromkeys([*USUAL, *PRODUCT])]


@pytest.mark.parametrize(("drafter", "tree", "draft_sampling", "warping"), CASES)
def test_texts_are_distributed_as_plain_sampling(drafter, tree, draft_sampling, warping):
    # A random head that feeds on its own output proposes what the base never writes.
    head = lively_head(drafter, BASE) if drafter in KINDS else drafter
    texts = sample(TREES[tree], draft_sampling, *warping, head)
    assert p_value(texts, exact(*warping)) > 1e-3


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_size": 8}
# Experts and caps; a delta net below gated attention; norms after branches and a sigmoid router;
# heads of two widths, of which the wider ones' keys are values; a layer that reads another's keys.
UNLIKE = {
    "experts and caps": EXPERTS | {"logit_cap": 2.0, "score_cap": 1.0},
    "delta nets": {
        "num_layers": 2,
        "delta": DeltaConfig(1, 2, 8, 4, 4),
        "full_attention_layers": (1,),
        "output_gate": True,
        "query_key_norm": True,
    },
    "norms after branches": {
        **EXPERTS,
        "pre_norms": False,
        "post_norms": True,
        "joint_head_norm": True,
        "router": "sigmoid",
    },
    "heads of two widths": {
        **EXPERTS,
        "num_layers": 2,
        "sliding_window": 3,
        "full_attention_layers": (1,),
        "local_kv_heads": 2,
        "local_head_dim": 4,
        "post_norms": True,
        **dict.fromkeys(("keys_as_values", "value_norm", "scaled_output", "parallel_mlp"), True),
    },
    "shared keys": {
        "num_layers": 2,
        "num_sharing_layers": 1,
        "full_attention_layers": (0, 1),
        "token_size": 4,
        **dict.fromkeys(("query_key_norm", "value_norm", "scaled_output", "post_norms"), True),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", UNLIKE)
@pytest.mark.parametrize("drafter", ["clover2", "clover_lr", "medusa"])
def test_texts_of_other_families_are_distributed_as_plain_sampling_s(drafter, family):
    base = dataclasses.replace(BASE, **UNLIKE[family])
    texts = sample(SMALL_TREE, "sampled", 1.0, 1.0, drafter, base=base)
    assert p_value(texts, exact(1.0, 1.0, base=base)) > 1e-3


@pytest.mark.parametrize(
    "draft_sampling", [pytest.param("topk", marks=pytest.mark.slow), "sampled"]
)
def test_biased_texts_are_distributed_as_plain_sampling_s(draft_sampling):
    texts = sample(SMALL_TREE, draft_sampling, *CUT, biased=True)
    assert p_value(texts, exact(*CUT, biased=True)) > 1e-3


@pytest.mark.parametrize("rule", ["penalized", "masked"])
@pytest.mark.parametrize(
    ("drafter", "tree", "draft_sampling"),
    [
        ("clover2", "small", "sampled"),
        ("lookup", "copy:6", "topk"),
        *(
            pytest.param("clover2", *case, marks=pytest.mark.slow)
            for case in (
                ("none", "topk"),
                *itertools.product(["chain:3", "small"], ["topk", "sampled"]),
                ("small+copy:4", "topk"),
            )
        ),
    ],
)
def test_ruled_texts_are_distributed_as_plain_sampling_s(drafter, tree, draft_sampling, rule):
    texts = sample(TREES[tree], draft_sampling, *WARM, drafter, **{rule: True})
    assert p_value(texts, exact(*WARM, **{rule: True})) > 1e-3


def test_tokens_that_the_draft_gives_no_mass_are_reached(monkeypatch):
    monkeypatch.setattr(step, "SUPPORT", 3)  # of 5 tokens
    texts = sample(SMALL_TREE, "sampled", 1.0, 1.0)
    assert p_value(texts, exact(1.0, 1.0)) > 1e-3


@pytest.mark.parametrize(
    ("kind", "draft_sampling", "table"),
    [
        ("eagle3", "sampled", (0, 2, 3)),
        pytest.param("clover_lr", "topk", (0, 2, 3), marks=pytest.mark.slow),
        *(pytest.param(kind, "topk", None, marks=pytest.mark.slow) for kind in ("eagle", "eagle3")),
        *(
            pytest.param(kind, "sampled", (0, 2, 3), marks=pytest.mark.slow)
            for kind in ("clover_lr", "eagle", "dflash2")
        ),
    ],
)
def test_heads_that_feed_on_their_output_and_reduced_vocabularies(kind, draft_sampling, table):
    if kind == "clover_lr":
        drafter = random_head(BASE, kind, draft_to_target=table)
    else:
        drafter = lively_head(kind, BASE, draft_to_target=table)
    texts = sample(SMALL_TREE, draft_sampling, 1.0, 1.0, drafter)
    assert p_value(texts, exact(1.0, 1.0)) > 1e-3
    assert table is None or not np.isin(texts, table).all()


@pytest.mark.parametrize(
    ("drafter", "fault"),
    [
        ("clover2", "p_kept"),
        pytest.param("clover2", "q_kept", marks=pytest.mark.slow),
        *(pytest.param(name, "p_kept", marks=pytest.mark.slow) for name in ("clover", "medusa")),
    ],
)
def test_a_broken_verifier_is_seen(monkeypatch, drafter, fault):
    if fault == "q_kept":  # q is not renormalised after a rejection
        monkeypatch.setattr(accept, "_without_token", lambda q, taken: jnp.where(taken, 0, q))
    else:  # the rejected token's surplus is not taken out of p
        monkeypatch.setattr(accept._Residual, "without", lambda left, q: left)
    texts = sample(SMALL_TREE, "sampled", 1.0, 1.0, drafter)
    assert p_value(texts, exact(1.0, 1.0)) < 1e-6
