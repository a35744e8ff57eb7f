"""Rollouts: samples are the current base's, with its log-probabilities; updates cost nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from clover_jax.api import Sampler
from clover_jax.decoding.models import load
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.drafter import DRAFT_ROWS
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, base_logits, causal_mask
from clover_jax.runtime.compile_clock import CompileClock
from tests.tiny_models import TINY, decode_all, random_base, random_head, random_models

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7]]
SAMPLES = 800


@functools.cache
def moved_base(step: int):
    """Params as an update of a learner would leave them, with logits that are worth a test."""
    noise = jax.random.key(step)
    move = lambda x: x + 0.1 * jax.random.normal(noise, x.shape)  # noqa: E731
    params = jax.tree.map(move, dict(random_base()))
    return {**params, "lm_head": params["lm_head"] * 20}


@functools.cache
def sampler(name="clover2", tree="chain:3", batch_size=4):
    models = random_models(*random_head(TINY, name), parse_tree(tree))
    return Sampler(models, batch_size=batch_size)


@jax.jit
def full_forward(params, tokens):
    """Return the logits [B, S, V] after every token."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    output = Decoder(TINY).apply({"params": params}, tokens, positions, causal_mask(*tokens.shape))
    return base_logits(TINY, params, output.hidden["post_norm"])


def of_tokens(logits, tokens, temperature):
    scaled = jax.nn.log_softmax(logits[:, :-1] / temperature)
    return jnp.take_along_axis(scaled, tokens[:, 1:, None], axis=-1)[..., 0]


@pytest.mark.parametrize("name", ["clover2", "clover_lr"])
def test_log_probabilities_are_those_of_a_full_forward(name):
    rollouts = sampler(name)
    rollouts.update_base(moved_base(1))
    found = rollouts.sample(PROMPTS, n=2, max_new_tokens=12, temperature=0.7, seed=3)
    assert found.tokens.shape == found.mask.shape == found.logprobs.shape == (6, 12)
    assert found.mask.sum(axis=1).tolist() == found.lengths.tolist()
    for row, prompt in enumerate(found.prompt_ids):
        count = int(found.lengths[row])
        text = jnp.array([[*prompt, *found.tokens[row, :count]]])
        logits = full_forward(moved_base(1), text)
        for values, temperature in ((found.logprobs, 0.7), (found.base_logprobs, 1.0)):
            expected = of_tokens(logits, text, temperature)[0, -count:]
            np.testing.assert_allclose(values[row, :count], expected, atol=1e-4)
            assert not values[row, count:].any()


def test_a_prompt_is_read_once_for_all_its_completions():
    engine = sampler().models.engine(4, adapts=True)
    assert engine.prefill_size > len(PROMPTS[0])
    rollouts, read = sampler(), []
    stream = type(engine).stream

    def watched(*arguments):
        for update in stream(*arguments):
            if update.done:
                read.append((update.row.index, len(update.row.prompt_ids) - update.row.num_cached))
            yield update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "stream", watched)
        found = rollouts.sample(PROMPTS[:2], n=3, max_new_tokens=5, seed=1)
    # A prompt shorter than what a step may still have to absorb is read each time.
    assert [tokens for _, tokens in sorted(read)] == [8, 1, 1, 10, 1, 1]
    alone = [rollouts.sample([PROMPTS[0]] * 3, max_new_tokens=5, seed=1)]
    np.testing.assert_array_equal(found.tokens[:3], alone[0].tokens)
    np.testing.assert_allclose(found.logprobs[:3], alone[0].logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("drafter", "tree", "updates"),
    [
        ("clover2", "chain:3", 3),
        pytest.param("clover2", "chain:3", 20, marks=pytest.mark.slow),
        pytest.param("clover_lr", "chain:2+copy:3", 20, marks=pytest.mark.slow),
    ],
)
def test_after_every_update_samples_are_the_current_bases(drafter, tree, updates):
    rollouts, prompt = sampler(drafter, tree, batch_size=64), PROMPTS[0]
    plain = random_models(*random_head(TINY), TreeConfig.root_only()).plain().engine(3)
    statistic, degrees, used, made = 0.0, 0, set(), set()
    params = None
    with CompileClock() as compiling:
        for step in range(1, updates + 1):
            if step == 2:
                before = compiling.seconds
            del params  # the base before is nobody's: were it still used, it would be found below
            params = moved_base.__wrapped__(step)
            rollouts.update_base(params)

            # Texts of 12 tokens that begin alike, so that one shape of a forward serves them all.
            found = rollouts.sample([prompt], n=SAMPLES, max_new_tokens=12, seed=step)
            first = np.bincount(found.tokens[:, 0]).argmax()
            texts = np.where(found.mask, found.tokens, 0)[:64]
            texts = jnp.concatenate([jnp.tile(jnp.array(prompt), (64, 1)), texts], axis=1)
            expected = np.asarray(of_tokens(full_forward(params, texts), texts, 1.0))[:, -12:]
            error = np.abs(found.logprobs[:64] - expected)[found.mask[:64]].max()
            assert error < 1e-4, f"update {step}: log-probabilities are {error} off"

            # The first token, and the second of all texts with the commonest first one.
            texts = jnp.array([[*prompt, first]])
            logits = np.asarray(full_forward(params, texts)[0], np.float64)
            for at, drawn in ((-2, found.tokens[:, 0]), (-1, second_of(found, first))):
                counts = np.bincount(drawn, minlength=TINY.vocab_size)
                more = chi_square(counts, special.softmax(logits[at]) * len(drawn))
                statistic, degrees = statistic + more[0], degrees + more[1]

            found = rollouts.sample(PROMPTS, n=2, max_new_tokens=16, temperature=0.0)
            rows = decode_all(plain, params, {}, PROMPTS, 16, TINY.eos_token_ids)
            for copy, count in enumerate(found.lengths):
                assert found.tokens[copy, :count].tolist() == rows[copy // 2].output_ids
                assert found.finish_reasons[copy] == rows[copy // 2].finish_reason
            assert not found.logprobs.any()
            if step > 1:
                used.add(sum(array.nbytes for array in jax.live_arrays()))
                made.add(compiling.seconds - before)
    assert stats.chi2.sf(statistic, degrees) > 1e-3, f"{statistic} of {degrees}"
    assert made == {0.0}
    assert len(used) == 1, "device memory grows with updates"


def second_of(found, first):
    return found.tokens[(found.tokens[:, 0] == first) & (found.lengths > 1), 1]


def chi_square(counts, expected):
    """Return the statistic and its degrees of freedom, rare tokens taken together."""
    rare = expected < 5
    joined = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    observed, wanted = (x[joined[1] > 0] for x in joined)
    return ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1


def test_a_quantized_copy_of_lm_head_follows_the_base():
    models = load(ModelSpec(draft="random:medusa", int8=("draft",), tokenizer=False))
    params = {k: v for k, v in models.base.params.items() if k != DRAFT_ROWS}
    rollouts = Sampler(models)
    rollouts.update_base({**params, "embedding": 2 * params["embedding"]})  # tied
    old, new = models.base.params[DRAFT_ROWS], rollouts.models.base.params[DRAFT_ROWS]
    assert (new.values == old.values).all()
    np.testing.assert_allclose(new.step, 2 * old.step)


def test_params_of_another_base_are_refused_by_name():
    params = dict(moved_base(1))
    params["embedding"] = params["embedding"][:-1]
    with pytest.raises(UserError, match=r"param embedding of the base is float32\[96, 32\], and"):
        sampler().update_base(params)
    del params["embedding"]
    with pytest.raises(UserError, match="and the new one is missing"):
        sampler().update_base(params)
    with pytest.raises(UserError, match=r"n \(0\) must be at least 1"):
        sampler().sample(PROMPTS, n=0)
