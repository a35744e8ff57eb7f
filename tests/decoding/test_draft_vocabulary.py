"""A head that can propose part of the vocabulary only: the text stays the base's own."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.decoding.engine import Engine
from clover_jax.decoding.programs import decode_chunk
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.drafter import frozen_from_base, output_matrix, with_draft_rows
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, init_state, train_step
from tests.layer_heads import KINDS, lively_head
from tests.tiny_models import TINY, decode_all, random_base, random_head, random_prompts
from tests.training.training_data import random_batch

PROMPTS = random_prompts(12, seed=11)


@functools.cache
def plain_texts():
    engine = Engine(TINY, None, TreeConfig.root_only(), batch_size=8)
    return [row.output_ids for row in decode_all(engine, random_base(), None, PROMPTS, 24)]


@functools.cache
def common_tokens():
    """The 20 most frequent tokens of the texts, so that drafts are accepted."""
    counts = np.bincount(np.concatenate(plain_texts()), minlength=TINY.vocab_size)
    return tuple(np.sort(np.argsort(-counts, kind="stable")[:20]).tolist())


def reduced_head(kind):
    table = common_tokens()
    if kind in KINDS:
        return lively_head(kind, draft_to_target=table)
    return random_head(name=kind, draft_to_target=table)


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        pytest.param("clover2", "paper25", marks=pytest.mark.slow),
        ("clover_lr", "paper25"),
        pytest.param("eagle", "dynamic:12:5:4", marks=pytest.mark.slow),
        ("eagle3", "dynamic:12:5:4"),
    ],
)
def test_greedy_text_equals_plain_text(kind, tree):
    head, params = reduced_head(kind)
    rows = decode_all(
        Engine(TINY, head, parse_tree(tree), batch_size=3), random_base(), params, PROMPTS, 24
    )
    assert [row.output_ids for row in rows] == plain_texts()
    # The texts also hold tokens that the head cannot propose.
    assert set(np.concatenate(plain_texts()).tolist()) - set(common_tokens())
    assert max(max(row.accepted) for row in rows) >= 2


def gathered_rows(function, *arguments):
    """Return the instructions of a program that gather the draft vocabulary's rows."""
    text = jax.jit(function).lower(*arguments).as_text()
    shape = f"tensor<20x{TINY.hidden_size}xf32>"
    return [line for line in text.splitlines() if re.search(rf"gather.*-> {shape}", line)]


def test_no_step_gathers_the_rows_of_the_vocabulary():
    head, params = reduced_head("clover2")
    tree = parse_tree("chain:2")
    state = jax.eval_shape(lambda: empty_state(TINY, head, tree, 2, 64, 1, jnp.float32))
    config = StepConfig(TINY, head, tree)
    base_params = with_draft_rows(random_base(), head.config)

    def step(base_params, state):
        return decode_chunk(config, 2, Weights(base_params, params), state, jnp.ones(2, bool))

    assert gathered_rows(step, base_params, state) == []

    def careless(base_params, state):
        return step(with_draft_rows(base_params, head.config), state)

    assert len(gathered_rows(careless, random_base(), state)) == 1


def test_no_training_step_gathers_them_either():
    head, _ = reduced_head("clover2")
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 1e-3, 0), 16)
    base_params = with_draft_rows(random_base(), head.config)
    state = jax.eval_shape(lambda base: init_state(config, base, 0), random_base())
    step = functools.partial(train_step, config)
    assert gathered_rows(step, state, base_params, random_batch()) == []


def test_rows_that_nobody_gathered_are_missed():
    config = reduced_head("clover2")[0].config
    with pytest.raises(ValueError, match=r"hand with_draft_rows\(base_params, config\) to the"):
        output_matrix(config, frozen_from_base(random_base()))


@pytest.mark.parametrize("table", [(), (3, 3), (5, 4), (-1, 2), (0, 96)])
def test_an_impossible_vocabulary_is_refused(table):
    config = random_head()[0].config
    with pytest.raises(ValueError, match=r"ids\) must ascend and lie in 0 \.\. 95"):
        dataclasses.replace(config, draft_to_target=table)


def test_a_vocabulary_survives_its_json():
    config = reduced_head("eagle3")[0].config
    assert type(config).from_dict(config.to_dict()) == config
