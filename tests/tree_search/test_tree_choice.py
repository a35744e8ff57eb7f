"""The choice of a tree is a function of costs and samples: fixed ones here, made by hand."""

import dataclasses

import numpy as np
import pytest

from clover_jax.decoding.tree_config import parse_tree
from clover_jax.tree_search import tree_choice
from clover_jax.tree_search.tree_choice import (
    CostTable,
    choose_tree,
    describe_prospects,
    dynamic_like,
    finalists,
)

FREE_DRAFT = CostTable(
    plain=1.0,
    verify=((1, 1.0), (128, 1.0)),
    first=0.0,
    level=((1, 0.0), (8, 0.0)),
    rest=0.0,
)
RANKS = np.array([[0, 0, 0], [0, 0, 1], [0, 1, -1], [1, 0, 0]])


def expected_accepted(tree, ranks):
    """Return the mean number of a tree's drafted tokens that the samples accept, one by one."""
    paths, total = set(tree.paths), 0
    for row in ranks.tolist():
        total += sum(tuple(row[:length]) in paths for length in range(1, len(row) + 1))
    return total / len(ranks)


def test_where_nothing_costs_every_path_that_occurs_is_taken():
    choice = choose_tree(FREE_DRAFT, RANKS)
    paths = {(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)}
    assert set(choice.tree.paths) == paths
    assert choice.accepted == pytest.approx((3 + 3 + 2 + 3) / 4)
    assert choice.accepted == pytest.approx(expected_accepted(choice.tree, RANKS))
    assert choice.speed_up == pytest.approx(1 + choice.accepted)


def test_dear_levels_make_a_flat_tree():
    dear = dataclasses.replace(FREE_DRAFT, level=((1, 3.0), (8, 3.0)))
    choice = choose_tree(dear, RANKS)
    assert choice.tree.paths == ((0,), (1,))
    assert choice.speed_up == pytest.approx(2.0)


def test_dear_slots_make_a_small_tree():
    dear = dataclasses.replace(FREE_DRAFT, verify=((1, 1.0), (2, 1.2), (3, 2.0), (128, 127.0)))
    assert choose_tree(dear, RANKS).tree.paths == ((0,),)


def test_where_no_tree_pays_decoding_is_plain():
    dear = dataclasses.replace(FREE_DRAFT, first=5.0)
    choice = choose_tree(dear, RANKS)
    assert (choice.tree.num_nodes, choice.speed_up) == (0, 1.0)
    assert len(choice.considered) == 3
    assert finalists(choice, by_rank=True) == []


def test_without_samples_decoding_is_plain():
    choice = choose_tree(FREE_DRAFT, np.zeros((0, 3), int))
    assert (choice.tree.num_nodes, choice.considered) == (0, ())


def test_the_most_nodes_bound_the_tree(monkeypatch):
    monkeypatch.setattr(tree_choice, "MOST_NODES", 3)
    assert choose_tree(FREE_DRAFT, RANKS).tree.num_nodes == 3


def test_sampled_children_get_a_tree_without_gaps_at_what_it_costs(monkeypatch):
    ranks = np.array([[0], [2], [0]])
    costs = dataclasses.replace(FREE_DRAFT, verify=((1, 1.0), (3, 1.0), (4, 1.1), (128, 127.0)))
    assert choose_tree(costs, ranks).tree.paths == ((0,), (2,))
    choice = choose_tree(costs, ranks, gaps=False)
    assert choice.tree.paths == ((0,), (1,), (2,))
    assert (choice.accepted, choice.seconds) == (1.0, 1.1)
    assert choice.accepted == expected_accepted(choice.tree, ranks)
    monkeypatch.setattr(tree_choice, "MOST_NODES", 2)
    assert choose_tree(costs, ranks, gaps=False).tree.paths == ((0,),)


def test_without_gaps_every_tree_worth_a_trial_can_be_drawn():
    ranks = np.array([[0, 3], [2, 1], [0, 3], [2, -1], [1, 0]])
    choice = choose_tree(FREE_DRAFT, ranks, gaps=False)
    trees = finalists(choice, by_rank=False)
    assert len(trees) == 2
    assert not any(tree.has_rank_gaps for tree in trees)
    assert choice.accepted == pytest.approx(expected_accepted(choice.tree, ranks))


def test_the_table_names_every_depth():
    lines = describe_prospects(choose_tree(FREE_DRAFT, RANKS), FREE_DRAFT)
    assert lines[0].endswith("a plain step takes 1000.00 ms")
    assert [line.split()[:2] for line in lines[2:]] == [["1", "2"], ["2", "5"], ["3", "8"]]


def test_the_best_two_a_dynamic_tree_like_the_best_and_copies_beside_them_are_tried():
    choice = choose_tree(FREE_DRAFT, RANKS)
    trees = finalists(choice, by_rank=True)
    assert [tree.num_nodes for tree in trees] == [8, 5, 8, 16, 16]
    assert trees[2].name == "dynamic:8:3:2"
    assert [tree.drafted for tree in trees[3:]] == [trees[0], trees[2]]
    assert finalists(choice, by_rank=False) == trees[:2]


def test_a_head_that_only_copies_is_tried_with_copies_alone():
    dear = dataclasses.replace(FREE_DRAFT, first=30.0)
    choice = choose_tree(dear, RANKS)
    trees = finalists(choice, by_rank=True, only_copies=True)
    assert [tree.name for tree in trees] == ["copy:8", "copy:16"]


def test_a_tree_a_little_dearer_than_plain_decoding_is_tried_all_the_same():
    dear = dataclasses.replace(FREE_DRAFT, first=3.0)
    choice = choose_tree(dear, RANKS)
    assert choice.tree.num_nodes == 0
    assert [round(other.speed_up, 2) for other in choice.considered] == [0.5, 0.75, 0.94]
    assert [tree.num_nodes for tree in finalists(choice, by_rank=False)] == [8]


def test_a_dynamic_tree_is_as_wide_as_the_docstring_says():
    assert dynamic_like(parse_tree("paper25")).name == "dynamic:25:5:4"
    assert dynamic_like(parse_tree("chain:3")).name == "dynamic:3:3:1"


def test_costs_between_measured_sizes_are_interpolated_and_beyond_grow():
    costs = dataclasses.replace(FREE_DRAFT, verify=((1, 1.0), (3, 2.0)))
    assert costs.step(parse_tree("chain:1")) == pytest.approx(1.5)
    assert costs.step(parse_tree("chain:5")) == pytest.approx(4.0)


def test_a_cost_table_survives_json():
    assert CostTable.from_dict(FREE_DRAFT.to_dict()).step(parse_tree("chain:3")) == 1.0
