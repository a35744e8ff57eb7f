"""Penalties and min_p: greedy text is plain decoding's and transformers'; slots count paths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling import NO_TOKEN, RowPenalties, empty_sampling, penalize, warp
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig, SamplingParams
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.errors import UserError
from tests.decoding.reference import _logits
from tests.tiny_models import (
    SMALL_TREE,
    TINY,
    decode,
    finished,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)
from tests.torch_pairs import SHAPE, random_ids, save_random_model

RULES = SamplingConfig("greedy", penalized=True)
# Repetition, frequency and presence.
AMOUNTS = [(1.4, 0.0, 0.0), (1.0, 0.6, 0.0), (1.0, 0.0, 1.5), (1.2, 0.3, -0.7), (1.0, 0.0, 0.0)]
NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def requests(**more):
    """One row with each of AMOUNTS; the last has none."""
    prompts = random_prompts(len(AMOUNTS), seed=3)
    params = [SamplingParams(**dict(zip(NAMES, each, strict=True)), **more) for each in AMOUNTS]
    rows = zip(prompts, params, strict=True)
    return [Request(i, prompt, 30, params=own) for i, (prompt, own) in enumerate(rows)]


def penalized(logits, prompt, answer, repetition, frequency, presence):
    """The penalties one token after another, as their definitions have them."""
    logits = np.array(logits)
    for token in {*prompt, *answer}:
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    for token in set(answer):
        logits[token] -= frequency * answer.count(token) + presence
    return logits


def slow(request, amounts):
    answer = []
    for _ in range(request.max_new_tokens):
        text = [*request.prompt_ids, *answer]
        logits = _logits(TINY, random_base(), text)[len(text) - 1]
        answer.append(int(penalized(logits, request.prompt_ids, answer, *amounts).argmax()))
    return answer


@functools.cache
def expected():
    return [slow(*each) for each in zip(requests(), AMOUNTS, strict=True)]


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        (TreeConfig.root_only(), RULES),
        (SMALL_TREE, RULES),
        (parse_tree("dynamic:5:3:3+copy:4"), RULES),
        pytest.param(SMALL_TREE, dataclasses.replace(RULES, verify="lossless", biased=True)),
    ],
    ids=["none", "small", "copies", "lossless"],
)
def test_greedy_text_is_the_argmax_of_penalized_logits(tree, rules):
    head = random_head()[0] if tree.num_nodes else None
    rows = decode(Engine(TINY, head, tree, rules, batch_size=3), requests())
    assert texts_of(rows) == expected()
    assert len({tuple(text) for text in texts_of(rows)}) == len(rows)
    # Rows that repeat themselves less accept less, but drafted tokens are on the way of counts.
    assert not tree.num_nodes or max(max(row.accepted) for row in rows[:4]) >= 2


def test_a_slot_counts_the_drafted_tokens_on_its_path():
    amounts, prompt, answer = (1.3, 0.5, 0.25), [1, 2], [3, 3]
    penalties = (jnp.array([value]) for value in (len(prompt), *amounts, 0.0))
    rows = empty_sampling(1).replace(penalties=RowPenalties(*penalties))
    logits = np.random.default_rng(0).normal(size=(1, 3, 8)).astype(np.float32)
    text = jnp.array([[*prompt, *answer, 7, 7]])  # what lies beyond the end counts nowhere
    none = NO_TOKEN
    paths = jnp.array([[[none, none, none], [none, 3, none], [none, 5, 5]]])
    given = penalize(jnp.asarray(logits), rows, text, jnp.array([4]), paths)[0]
    for slot, path in enumerate(([], [3], [5, 5])):
        wanted = penalized(logits[0, slot], prompt, answer + path, *amounts)
        np.testing.assert_allclose(given[slot], wanted, rtol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("tree", ["none", "chain:3"])
def test_repetition_penalty_is_transformers_s(tree, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, bos_token_id=None, eos_token_id=None)
    model = save_random_model(transformers.LlamaForCausalLM(config), tmp_path)
    prompt, base = random_ids(9), load_base(str(tmp_path), jnp.float32)
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, repetition_penalty=1.3
    )
    head, params = random_head(base.config, "lookup") if tree != "none" else (None, {})
    engine = Engine(base.config, head, parse_tree(tree), RULES)
    request = Request(0, prompt, 40, params=SamplingParams(repetition_penalty=1.3))
    (row,) = finished(engine.stream(base.params, params, [request]))
    assert prompt + row.output_ids == wanted[0].tolist()
    plain = dataclasses.replace(request, params=SamplingParams())
    (other,) = finished(engine.stream(base.params, params, [plain]))
    assert other.output_ids != row.output_ids


@pytest.mark.parity
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
def test_min_p_is_transformers_s(min_p):
    torch = pytest.importorskip("torch")
    warper = pytest.importorskip("transformers").MinPLogitsWarper
    logits = 2 * np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    wanted = warper(min_p)(None, torch.tensor(logits / np.float32(0.7))).numpy()
    fields = (jnp.zeros(6, int), jnp.ones(6), jnp.zeros(6), jnp.zeros(6), jnp.full(6, min_p))
    rows = empty_sampling(6).replace(temperature=jnp.full(6, 0.7), penalties=RowPenalties(*fields))
    given = warp(jnp.asarray(logits)[:, None], rows, truncate=False)[:, 0]
    np.testing.assert_allclose(jax.nn.softmax(given), jax.nn.softmax(wanted), atol=1e-6)


def test_rows_without_penalties_run_the_programs_of_an_engine_without(chunks):
    texts, head = [], random_head()[0]
    for penalized_ in (False, True):
        sampling = SamplingConfig("lossless", penalized=penalized_)
        engine = Engine(TINY, head, parse_tree("chain:3"), sampling, adapts=True, batch_size=2)
        texts.append(decode(engine, requests()[4:])[0].output_ids)
    assert texts == [expected()[4]] * 2
    assert len(set(chunks)) == 1
    assert chunks[0].config.sampling == GREEDY
    # Beside rows with penalties it has the same text by the other program.
    assert texts_of(decode(engine, requests())) == expected()
    assert any(one.config.sampling.penalized for one in chunks)


def test_an_engine_without_the_rule_refuses_penalties():
    engine = Engine(TINY, None, TreeConfig.root_only())
    with pytest.raises(UserError, match=r"need an engine with SamplingConfig\(penalized=True\)"):
        engine.check(Request(0, [1], 5, params=SamplingParams(presence_penalty=0.5)))
