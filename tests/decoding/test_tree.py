import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.decoding.tree import ancestor_mask, node_depth
from clover_jax.decoding.tree_config import TreeConfig, parse_tree, portable_name
from clover_jax.errors import UserError


@st.composite
def parent_rows(draw, batch=2, slots=9):
    """Random trees, parents before children."""
    rows = [
        [-1, *(draw(st.integers(0, slot - 1)) for slot in range(1, slots))] for _ in range(batch)
    ]
    return np.array(rows, np.int32)


def test_paper25_is_the_tree_of_the_release():
    tree = parse_tree("paper25")
    per_level = [len(level.rank) for level in tree.levels()]
    expanded = [1, *(level.expanded.size for level in tree.levels())]
    assert (tree.num_nodes, tree.depth) == (25, 5)
    assert per_level == [4, 8, 8, 3, 2]
    assert expanded == [1, 4, 4, 1, 1, 0]


def test_a_chain_is_one_path():
    np.testing.assert_array_equal(parse_tree("chain:3").parents(), [-1, 0, 1, 2])


def test_a_file_holds_rank_paths_in_any_order(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps([[0, 2], [1], [0]]))
    tree = parse_tree(f"file:{path}")
    assert tree.paths == ((0,), (1,), (0, 2))
    np.testing.assert_array_equal(tree.parents(), [-1, 0, 0, 1])


def test_a_portable_name_holds_the_paths_of_a_file(tmp_path):
    (tmp_path / "a.json").write_text("[[0], [0, 2]]")
    tree = parse_tree(f"file:{tmp_path / 'a.json'}")
    assert portable_name(tree) == "paths:0/0.2"
    assert parse_tree("paths:0/0.2").paths == tree.paths
    assert portable_name(parse_tree("dynamic:9")) == "dynamic:9"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("paper26", "'paper26' is unknown; use paper25, chain:P"),
        ("chain:0", "'chain:0' is unknown"),
        ("file:/nowhere.json", "cannot be read: No such file"),
        ("paths:0/x", "must be rank paths like paths:0/1/0.0: invalid literal"),
        ("paths:0.1", r"must be rank paths .* path \[0, 1\] needs its parent \[0\]"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name, message):
    with pytest.raises(UserError, match=message):
        parse_tree(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON list of rank paths"),
        ("[[0, 1]]", r"path \[0, 1\] needs its parent \[0\]"),
        ("[[0], [0]]", "lists a path twice"),
        ("[[-1]]", "ranks from 0 on"),
        ("7", "JSON list of rank paths"),
        ("[]", "JSON list of rank paths"),
        ("[[0.5]]", "JSON list of rank paths"),
        ("[[true]]", "JSON list of rank paths"),
        ('["0"]', "JSON list of rank paths"),
    ],
)
def test_a_broken_tree_file_is_named_with_its_fault(tmp_path, content, message):
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        parse_tree(f"file:{path}")


def test_a_tree_survives_its_json():
    tree = parse_tree("paper25")
    assert TreeConfig.from_dict(tree.to_dict()) == tree


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
