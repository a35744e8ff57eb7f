"""Trees: names, static shapes, and adaptive ones against rules written out with loops."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.step import StepConfig
from clover_jax.decoding.tree import Grower, ancestor_mask, draft_adaptive, node_depth
from clover_jax.decoding.tree_config import (
    DEFAULT_DEPTH,
    DEFAULT_WIDTH,
    AdaptiveTree,
    TreeConfig,
    parse_tree,
    portable_name,
)
from clover_jax.drafters.drafter import PAD_TOKEN, AcceptedPositions, frozen_from_base
from clover_jax.errors import UserError
from tests.tiny_models import TINY, decoded, random_base, random_head, random_prompts, texts_of


@st.composite
def parent_rows(draw, batch=2, slots=9):
    """Random trees, parents before children."""
    rows = [
        [-1, *(draw(st.integers(0, slot - 1)) for slot in range(1, slots))] for _ in range(batch)
    ]
    return np.array(rows, np.int32)


def test_paper25_is_the_tree_of_the_release_and_a_chain_is_one_path():
    tree = parse_tree("paper25")
    per_level = [len(level.rank) for level in tree.levels()]
    expanded = [1, *(level.expanded.size for level in tree.levels())]
    assert (tree.num_nodes, tree.depth) == (25, 5)
    assert per_level == [4, 8, 8, 3, 2]
    assert expanded == [1, 4, 4, 1, 1, 0]
    np.testing.assert_array_equal(parse_tree("chain:3").parents(), [-1, 0, 1, 2])


def test_a_file_holds_rank_paths_in_any_order_and_a_portable_name_holds_them_too(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps([[0, 2], [1], [0]]))
    tree = parse_tree(f"file:{path}")
    assert tree.paths == ((0,), (1,), (0, 2))
    np.testing.assert_array_equal(tree.parents(), [-1, 0, 0, 1])
    assert portable_name(tree) == "paths:0/1/0.2"
    assert parse_tree("paths:0/1/0.2").paths == tree.paths
    assert portable_name(parse_tree("dynamic:9")) == "dynamic:9"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("paper26", "'paper26' is unknown; use paper25, chain:P"),
        ("chain:0", "'chain:0' is unknown"),
        ("file:/nowhere.json", "cannot be read: No such file"),
        ("paths:0/x", "must be rank paths like paths:0/1/0.0: invalid literal"),
        ("paths:0.1", r"must be rank paths .* path \[0, 1\] needs its parent \[0\]"),
        ("dynamic", "as in dynamic:25"),
        ("dynamic:x", "as in dynamic:25"),
        ("dynamic:0", r"nodes \(0\)"),
        ("dynamic:99:1:8", "1 levels of width 8 draft 8 nodes, fewer than the 99 wanted"),
        ("clover4:5", "must be dynamic"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name, message):
    with pytest.raises(UserError, match=message):
        parse_tree(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0, 1]]", r"path \[0, 1\] needs its parent \[0\]"),
        ("[[0], [0]]", "lists a path twice"),
        ("[[-1]]", "ranks from 0 on"),
        *((text, "JSON list of rank paths") for text in ("{", "7", "[]", "[[0.5]]", "[[true]]")),
        ('["0"]', "JSON list of rank paths"),
    ],
)
def test_a_broken_tree_file_is_named_with_its_fault(tmp_path, content, message):
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        parse_tree(f"file:{path}")


def test_trees_survive_their_json():
    for kind, name in ((TreeConfig, "paper25"), (AdaptiveTree, "dynamic:9:4:3")):
        assert kind.from_dict(parse_tree(name).to_dict()) == parse_tree(name)


def test_ancestor_mask_of_the_docstring():
    mask = ancestor_mask(jnp.array([[-1, 0, 1, 0]]), depth=2)
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))


@settings(deadline=None, max_examples=25)
@given(parent_rows())
def test_ancestor_mask_and_depth_agree_with_a_walk_to_the_root(parent):
    slots = parent.shape[1]
    expected = np.zeros((*parent.shape, slots), bool)
    for row in range(parent.shape[0]):
        for slot in range(slots):
            above = slot
            while above >= 0:
                expected[row, slot, above] = True
                above = parent[row, above]
    mask = ancestor_mask(jnp.asarray(parent), depth=slots - 1)
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(node_depth(mask), expected.sum(-1) - 1)


@functools.cache
def compiled(module, method, depth):
    return jax.jit(
        lambda params, *rest: module.apply({"params": params}, *rest, *depth, method=method)
    )


class SlowHead:
    """Follows one path of drafted tokens at a time."""

    def __init__(self, hot: float):
        self.head, params = random_head()
        # Sharper proposals, so that the rules have something to choose between.
        self.params = params
        base = dict(random_base())
        self.frozen = frozen_from_base({**base, "lm_head": base["lm_head"] * hot})
        width = TINY.hidden_size
        features = jax.random.normal(jax.random.key(5), (1, 4, width))
        next_tokens = jnp.array([[3, 9, 27, 81]])
        zero, cache = jnp.zeros(1, jnp.int32), self.head.module.init_cache(1, 64, jnp.float32)
        self.root = 81
        accepted = AcceptedPositions(features, next_tokens, zero, jnp.array([4]), next_tokens)
        self.state, self.cache = self.apply("absorb", accepted, cache)

    def apply(self, method, *arguments, depth=()):
        """Call a method of the head, compiled; `depth` is its static last argument."""
        return compiled(self.head.module, method, depth)(self.params, self.frozen, *arguments)

    def probabilities(self, path):
        """Return the draft's distribution after a path of tokens."""
        state, zero = self.state, jnp.zeros((1, 1), jnp.int32)
        for depth, token in enumerate(path, start=1):
            token = jnp.array([[token]])
            state = self.apply("advance", state, self.cache, zero, token, depth=(depth,))
        logits = self.apply("propose", state, depth=(len(path),))
        logits = np.asarray(logits[0, 0], np.float64)
        p = np.exp(logits - logits.max())
        return p / p.sum()

    def draft(self, tree):
        grower = Grower(self.head, self.params, self.frozen, self.cache)
        root = jnp.array([self.root])
        drafted, _ = jax.jit(lambda state: draft_adaptive(grower, root, state, tree))(self.state)
        return drafted.tree.tokens[0].tolist(), drafted.tree.parent[0].tolist()


def paths_of(tokens, parents):
    """Return the set of token paths of a drafted tree; padding left out."""
    paths = {0: ()}
    for slot in range(1, len(tokens)):
        if tokens[slot] != PAD_TOKEN:
            paths[slot] = (*paths[parents[slot]], tokens[slot])
    return set(paths.values()) - {()}


def dynamic_by_hand(head, tree):
    pool, frontier = {}, {(): 1.0}
    for _ in range(tree.depth):
        level = {}
        for path, joint in frontier.items():
            p = head.probabilities(path)
            for token in np.argsort(-p, kind="stable")[: tree.width]:
                level[(*path, int(token))] = joint * p[token]
        pool |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: tree.width])
    return set(sorted(pool, key=lambda path: -pool[path])[: tree.nodes])


def clover4_by_hand(head, tree):
    kept, frontier, remaining = set(), {(): 1.0}, tree.nodes
    for _ in range(tree.depth):
        level = {}
        for path, joint in frontier.items():
            p, before = head.probabilities(path), 0.0
            for token in np.argsort(-p, kind="stable"):
                if before >= 0.8 or p[token] < 0.25 * p.max():
                    break
                level[(*path, int(token))] = joint * p[token]
                before += p[token]
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:remaining])
        kept |= set(frontier)
        remaining -= len(frontier)
    return kept


@pytest.mark.parametrize("name", ["dynamic:9:4:3", "dynamic:3:1:3"])
def test_the_dynamic_tree_holds_the_most_probable_nodes_seen(name):
    head, tree = SlowHead(40.0), parse_tree(name)
    tokens, parents = head.draft(tree)
    assert tokens[0] == head.root
    assert all(parent < slot for slot, parent in enumerate(parents))
    assert len(tokens) == tree.nodes + 1
    assert paths_of(tokens, parents) == dynamic_by_hand(head, tree)


@pytest.mark.parametrize(
    ("name", "depth", "width"),
    [
        *(("dynamic:1", 1, 1), ("dynamic:3", 3, 3), ("dynamic:7", 6, 7), ("dynamic:25", 6, 8)),
        *(("dynamic:3:5", 5, 3), ("dynamic:3:2:9", 2, 9)),
    ],
)
def test_a_dynamic_tree_is_by_default_no_larger_than_its_nodes_can_be(name, depth, width):
    tree = parse_tree(name)
    assert (tree.name, tree.depth, tree.width) == (name, depth, width)


@pytest.mark.parametrize("hot", [1.0, 40.0])  # a wide tree and a deep one
def test_levels_and_children_beyond_the_nodes_change_no_tree(hot):
    head, tree = SlowHead(hot), parse_tree("dynamic:3")
    larger = AdaptiveTree(tree.name, tree.rule, tree.nodes, DEFAULT_DEPTH, DEFAULT_WIDTH)
    assert head.draft(tree) == head.draft(larger)


@pytest.mark.parametrize("hot", [5.0, 40.0, 200.0])
def test_clover4_spends_four_nodes_on_the_most_probable(hot):
    head, tree = SlowHead(hot), parse_tree("clover4")
    tokens, parents = head.draft(tree)
    assert paths_of(tokens, parents) == clover4_by_hand(head, tree)


@pytest.mark.parametrize(
    ("name", "batch_size", "verify"),
    [
        pytest.param("dynamic:12:5:4", 3, "greedy", marks=pytest.mark.slow),
        ("clover4", 8, "greedy"),
        ("dynamic:12:5:4", 8, "lossless"),
    ],
)
def test_text_equals_plain_text(name, batch_size, verify):
    prompts, how = random_prompts(30, seed=11), {"sampling": SamplingConfig(verify)}
    rows = decoded(random_head(), name, prompts, 20, batch_size=batch_size, **how)
    assert texts_of(rows) == texts_of(decoded(None, "none", prompts, 20))
    assert max(max(row.accepted) for row in rows) >= 1


def test_sampled_children_are_refused():
    sampled = SamplingConfig("lossless", "sampled")
    with pytest.raises(ValueError, match="chosen by probability, so its children are not drawn"):
        StepConfig(TINY, random_head()[0], parse_tree("dynamic:9"), sampled)
