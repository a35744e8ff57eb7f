"""Copies of the text, and drafts over a reduced vocabulary: no text changes by them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.decoding.copies import add_copies, count_copies, no_counts
from clover_jax.decoding.programs import decode_chunk
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights
from clover_jax.decoding.tree import BestCopy, TokenTree, guessed_scores
from clover_jax.decoding.tree_config import CopyTree, TreeConfig, parse_tree, portable_name
from clover_jax.drafters.drafter import PAD_TOKEN, frozen_from_base, output_matrix, with_draft_rows
from clover_jax.drafters.text_matches import known_text
from clover_jax.errors import UserError
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, init_state, train_step
from tests.layer_heads import KINDS, lively_head
from tests.tiny_models import (
    SMALL_TREE,
    TINY,
    decoded,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)
from tests.training.training_data import random_batch

NONE = TreeConfig.root_only()
MOST = 8  # tokens of a match that are told apart
ROOM = 16  # of every buffer, so that few programs are compiled
with_copies = jax.jit(add_copies, static_argnums=(5, 6), static_argnames="keep_drafted")

DRAFTED_PROMPTS = random_prompts(12, seed=11)


def copied(text, nodes, drafted=NONE, tokens=(), source=None):
    """Return the paths of tokens of the whole tree, in the order of slots, and which are copies."""
    parents = jnp.asarray(drafted.parents())[None]
    tree = TokenTree(jnp.array([[text[-1], *tokens]]), parents, drafted.depth)
    end = jnp.array([len(text) - 1])
    beyond = [99] * (ROOM - len(text))  # is never copied
    buffer = jnp.array([[*text, *beyond]])
    padded = known_text(buffer, end, None if source is None else jnp.array([[PAD_TOKEN, *source]]))
    sizes = (drafted.num_nodes + nodes, max(nodes, drafted.depth))
    given = tree, guessed_scores(drafted), padded, end, no_counts(1)
    with_best = with_copies(*given, *sizes, keep_drafted=True)
    found, best = with_best.tree, with_best.copy
    paths = {0: ()}
    for slot in range(1, sizes[0] + 1):
        if found.tokens[0, slot] != PAD_TOKEN:
            above = paths[int(found.parent[0, slot])]
            paths[slot] = (*above, int(found.tokens[0, slot]))
    whole = [path for path in paths.values() if path]
    assert len(set(whole)) == len(whole), "siblings carry different tokens"
    return whole, found.copied[0, 1:].tolist(), best


def test_a_chain_follows_the_longest_match():
    paths, are_copies, best = copied([1, 2, 3, 4, 5, 1, 2], 3)
    assert paths == [(3,), (3, 4), (3, 4, 5)]
    assert are_copies == [True] * 3
    assert best.tokens[0].tolist() == [3, 4, 5]
    assert best.length[0] == 2
    # A loop is copied round and round.
    paths, _, _ = copied([7, 1, 2, 3, 1, 2, 3], 8)
    assert paths[-1] == (1, 2, 3, 1, 2, 3, 1, 2)


def test_two_matches_share_what_they_have_in_common():
    # "1 2" was followed by 3 4 and before that by 3 5; both begin with 3.
    paths, _, _ = copied([1, 2, 3, 5, 9, 1, 2, 3, 4, 9, 1, 2], 12)
    assert (3, 4) in paths
    assert paths.count((3,)) == 1
    # "2" alone was followed by another token.
    paths, _, _ = copied([2, 8, 9, 1, 2, 3, 4, 1, 2], 10)
    assert {(3,), (8,)} <= set(paths)


def test_a_found_node_is_not_copied_again_and_a_match_goes_on_after_it():
    drafted = TreeConfig("two", ((0,), (1,), (0, 0)))
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    # The head drafts 3, which the text has as well, 6, after which the text goes on, and 3 9.
    paths, are_copies, _ = copied(text, 4, drafted, tokens=(3, 6, 9))
    assert paths[:3] == [(3,), (6,), (3, 9)]
    assert are_copies == [False] * 3 + [True] * 4
    assert {(3, 4), (6, 7)} <= set(paths[3:])


def test_copies_of_another_text_end_with_it_and_without_a_match_slots_stay_empty():
    paths, are_copies, best = copied([1, 2, 3, 4], 5)
    assert (paths, are_copies) == ([], [False] * 5)
    assert (best.tokens == PAD_TOKEN).all()
    paths, _, _ = copied([1, 2, 3], 6, source=[9, 2, 3, 4, 5])
    assert paths == [(4,), (4, 5)]
    # The row's own text ends where the other begins.
    assert copied([7, 8], 4, source=[1, 2])[0] == []


def test_a_copy_that_was_often_wrong_is_worth_less_than_a_found_node():
    text = [1, 2, 3, 4, 5, 1, 2]
    arguments = (jnp.array([[*text, PAD_TOKEN]]), jnp.array([6]))
    drafted = TokenTree(jnp.array([[2, 8, 9]]), jnp.array([[-1, 0, 1]]), depth=2)
    score = jnp.log(jnp.array([[1.0, 0.3, 0.2]]))

    def tokens(counts):
        found = with_copies(drafted, score, *arguments, counts, 2, 2, keep_drafted=False)
        return sorted(found.tree.tokens[0, 1:].tolist())

    always = jnp.full((1, MOST + 1), 50.0)
    assert tokens(no_counts(1).replace(tried=always, right=always)) == [3, 4]
    assert tokens(no_counts(1).replace(tried=always)) == [8, 9]


def test_copies_are_counted_by_the_length_of_the_match():
    best = BestCopy(jnp.array([[4, 5, 6, 7]] * 3 + [[PAD_TOKEN] * 4]), jnp.array([7, 2, 2, 0]))
    emitted = jnp.array([[4, 5, 1, 0], [4, 5, 6, 7], [9, 5, 6, 7], [4, 5, 6, 7]])
    counts = count_copies(no_counts(4), best, emitted, jnp.array([3, 2, 4, 4]))
    # Right at 7 and 8, wrong at 8; right at 2 and 3; wrong at 2; nothing was copied.
    expected = np.zeros((2, 4, MOST + 1))
    expected[0, 0, [7, 8]], expected[1, 0, [7, 8]] = (1, 2), (1, 1)
    expected[:, 1, [2, 3]] = 1
    expected[0, 2, 2] = 1
    np.testing.assert_array_equal(np.stack([counts.tried, counts.right]), expected)


def test_every_tree_of_random_texts_is_a_tree():
    rng = np.random.default_rng(1)
    batch, size, nodes = 64, 40, 12
    text = jnp.asarray(rng.integers(0, 3, (batch, size)))
    end = jnp.asarray(rng.integers(0, size, batch))
    drafted = TreeConfig("few", ((0,), (1,), (0, 0), (0, 1)))
    # Siblings that a head drafts are different.
    first, second = (np.argsort(rng.random((batch, 3)), axis=1)[:, :2] for _ in range(2))
    root = jnp.take_along_axis(text, end[:, None], axis=1)
    tokens = jnp.concatenate([root, jnp.asarray(first), jnp.asarray(second)], axis=1)
    tree = TokenTree(tokens, jnp.asarray(drafted.parents())[None], drafted.depth)
    text = known_text(text, end, None)
    scores = jnp.log(jnp.array([1.0, 0.5, 0.3, 0.2, 0.1])) + jnp.zeros((batch, 1))
    for keeps in (True, False):
        arguments = (tree, scores, text, end, no_counts(batch), nodes, nodes)
        found = with_copies(*arguments, keep_drafted=keeps).tree
        assert found.copied.any()
        for row in range(batch):
            slots = np.flatnonzero(found.tokens[row] != PAD_TOKEN)[1:]
            parents = found.parent[row, slots]
            assert (parents < slots).all()
            assert (found.tokens[row, parents] != PAD_TOKEN).all()
            nodes_of = list(zip(parents.tolist(), found.tokens[row, slots].tolist(), strict=True))
            assert len(set(nodes_of)) == len(nodes_of)
        if keeps:
            np.testing.assert_array_equal(found.tokens[:, :5], tokens)


PROMPTS = random_prompts(40)


@pytest.fixture(scope="module")
def plain():
    return texts_of(decoded(None, "none", PROMPTS, 40))


@pytest.mark.parametrize(
    ("head", "tree"),
    [
        ("lookup", "copy:9"),
        pytest.param("lookup", "dynamic:9:4", marks=pytest.mark.slow),
        pytest.param("recycle", "dynamic:9:4:3+copy:5", marks=pytest.mark.slow),
        ("clover2", "small"),
        pytest.param("clover2", "dynamic:6:3+copy:5", marks=pytest.mark.slow),
        pytest.param("lookup", "chain:4", marks=pytest.mark.slow),
        pytest.param("clover_lr", "clover4+copy:5", marks=pytest.mark.slow),
    ],
)
def test_text_is_plain_decodings_and_no_row_depends_on_its_neighbors(plain, head, tree):
    drafter = random_head(name=head)
    tree = CopyTree("small+copy:5", SMALL_TREE, 5) if tree == "small" else parse_tree(tree)
    rows = decoded(drafter, tree, PROMPTS, 40)
    assert texts_of(rows) == plain
    for row in rows[:6]:
        (single,) = decoded(drafter, tree, [row.prompt_ids], 40, batch_size=1)
        assert (single.output_ids, single.accepted) == (row.output_ids, row.accepted)
        assert single.copied == row.copied
    if isinstance(tree, CopyTree):
        assert sum(sum(row.copied) for row in rows) > 0
        assert all(c <= a for row in rows for c, a in zip(row.copied, row.accepted, strict=True))


def test_names_of_trees_with_copies():
    tree = parse_tree("paper25+copy:16")
    assert (tree.num_nodes, tree.depth, tree.drafted.name) == (41, 16, "paper25")
    assert parse_tree("copy:4").drafted.num_nodes == 0
    for name in ("copy:4", "paper25+copy:16", "dynamic:9:3+copy:2"):
        assert portable_name(parse_tree(name)) == name
    for wrong in ("copy:0", "copy:", "paper25+copy:2+copy:3", "paper25copy:3"):
        with pytest.raises(UserError, match="unknown"):
            parse_tree(wrong)


plain_texts = functools.cache(lambda: texts_of(decoded(None, "none", DRAFTED_PROMPTS, 24)))


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
    rows = decoded(reduced_head(kind), tree, DRAFTED_PROMPTS, 24, batch_size=3)
    assert texts_of(rows) == plain_texts()
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


def test_a_vocabulary_survives_its_json_and_an_impossible_one_is_refused():
    config = reduced_head("eagle3")[0].config
    assert type(config).from_dict(config.to_dict()) == config
    for table in ((), (3, 3), (5, 4), (-1, 2), (0, 96)):
        with pytest.raises(ValueError, match=r"ids\) must ascend and lie in 0 \.\. 95"):
            dataclasses.replace(config, draft_to_target=table)
