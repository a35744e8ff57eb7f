"""Teacher-forced accuracy against loops over one text at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.draft_directory import Draft
from clover_jax.decoding.models import Models
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.evaluation import accuracy
from clover_jax.evaluation.accuracy import TOP
from clover_jax.evaluation.plan import Method
from clover_jax.evaluation.rows import TurnRow
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, causal_mask, project
from tests.tiny_models import TINY, random_base, random_head


def turn(prompt_ids, output_ids):
    return TurnRow(prompt_ids, output_ids, accepted=[], proposed=[], ranks=[], num_cut=0)


RNG = np.random.default_rng(0)
TEXTS = [
    turn(RNG.integers(0, 96, 5).tolist(), RNG.integers(0, 96, 9).tolist()),
    turn([7], RNG.integers(0, 96, 12).tolist()),
    turn(RNG.integers(0, 96, 250).tolist(), RNG.integers(0, 96, 20).tolist()),
    turn([3, 4], [5]),  # no pair: nothing follows the first emitted token
]


@pytest.fixture(scope="module")
def method(tmp_path_factory):
    base = BaseModel(TINY, random_base(), tmp_path_factory.mktemp("base"), "random")
    head, params = random_head()
    tree = parse_tree("chain:2")
    return Method("a", Models(base, None, Draft(head, params, None, {}, "a"), tree))


def by_hand(text):
    """Return pairs [P] and hits [3, P], pair by pair."""
    tokens = np.array([[*text.prompt_ids, *text.output_ids]])
    size = tokens.shape[1]
    best, logits = jax.device_get(_forward(tokens))
    order = np.argsort(-logits, axis=-1, kind="stable")
    pairs, hits = np.zeros(5, int), np.zeros((3, 5), int)
    for i in range(5):
        for t in range(size):
            if t + 1 >= len(text.prompt_ids) and t + 2 + i < size:
                pairs[i] += 1
                hits[:, i] += [best[t + 1 + i] in order[i, t, :k] for k in TOP]
    return pairs, hits


@jax.jit
def _forward(tokens):
    """Return the base's argmax [S] and the head's logits [P, S, V] of a single text."""
    head, params = random_head()
    positions = jnp.arange(tokens.shape[1])[None]
    output = Decoder(TINY).apply(
        {"params": random_base()}, tokens, positions, causal_mask(*tokens.shape)
    )
    frozen = frozen_from_base(random_base())
    best = jnp.argmax(project(frozen.lm_head, output.hidden["post_norm"])[0], axis=-1)
    batch = Batch(tokens, jnp.ones_like(tokens), positions, tokens >= 0)
    arguments = (frozen, output.hidden["pre_norm"], batch, None)
    hidden = head.module.apply({"params": params}, *arguments, method="train_forward")
    logits = [
        head.module.apply({"params": params}, frozen, hidden[i, 0], i, method="logits")
        for i in range(5)
    ]
    return best, jnp.stack(logits)


def test_hits_are_those_counted_pair_by_pair(method):
    found = dict(accuracy.measure(method, TEXTS))
    assert sorted(found) == [0, 1, 2, 3]
    for number, text in enumerate(TEXTS):
        pairs, hits = by_hand(text)
        assert found[number].pairs.tolist() == pairs.tolist()
        assert found[number].hits.tolist() == hits.tolist()
    assert found[2].pairs.tolist() == [19, 18, 17, 16, 15]
    assert sum(one.hits.sum() for one in found.values()) > 0


def test_shares_add_up_over_texts(method):
    found = [hits for _, hits in accuracy.measure(method, TEXTS[:2])]
    figures = accuracy.total(found).to_dict()
    assert figures["pairs"] == [8 + 11, 7 + 10, 6 + 9, 5 + 8, 4 + 7]
    assert figures["top_1"][0] == pytest.approx(sum(one.hits[0, 0] for one in found) / 19)
    assert figures["top_1"] <= figures["top_3"] <= figures["top_5"]
