"""Kinds of trees and their names; what a program is compiled for.

A static tree is a list of paths of child ranks: (0, 1) is the second most probable child of the
root's most probable one. An adaptive tree has bounds only, and `tree.py` grows another shape for
each row and step. A tree with copies adds nodes that are copied from the text.

Nothing here imports JAX: flags of the commands are checked with it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clover_jax.config import JsonConfig
from clover_jax.errors import UserError

# EAGLE-2 expands 10 nodes on each of 7 levels; a level of Clover costs a pass over lm_head, so
# fewer pay. Both can be set: dynamic:NODES:DEPTH:WIDTH. Fewer nodes than these use less of them.
DEFAULT_DEPTH, DEFAULT_WIDTH = 6, 8

# The release's tree of 25 nodes, by child ranks.
PAPER25 = (
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)


class Level(NamedTuple):
    """One level of a static tree; W counts its expanded nodes, those with children.

    parent:   [n] index of each node's parent among the expanded nodes of the level above.
    rank:     [n] which child of its parent each node is, by probability.
    expanded: [W] index, within this level, of the nodes that have children.
    """

    parent: np.ndarray
    rank: np.ndarray
    expanded: np.ndarray


@dataclasses.dataclass(frozen=True)
class TreeConfig(JsonConfig):
    """A static tree; fixes the shapes of the compiled step.

    name: what the user wrote ("paper25", "chain:4", ...); trees of other names may be equal.
    paths: child ranks of every node, any order; every prefix of a path is a path.
    """

    name: str = dataclasses.field(compare=False)
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        nodes = set(self.paths)
        if len(nodes) != len(self.paths):
            raise ValueError(f"tree {self.name!r} lists a path twice")
        for path in self.paths:
            # The empty path would be the root, which is not listed.
            if not path or min(path) < 0:
                raise ValueError(
                    f"tree {self.name!r}: path {list(path)} must hold one or more ranks from 0 on"
                )
            if len(path) > 1 and path[:-1] not in nodes:
                raise ValueError(
                    f"tree {self.name!r}: path {list(path)} needs its parent {list(path[:-1])}"
                )
        # In the order of slots: level by level, so that parents come before their children.
        object.__setattr__(self, "paths", tuple(sorted(nodes, key=lambda p: (len(p), p))))

    @classmethod
    def root_only(cls) -> TreeConfig:
        return cls("none")

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def num_slots(self) -> int:
        return len(self.paths) + 1

    @property
    def num_ranks(self) -> int:
        """Children of one drafted node that are candidates: its largest rank + 1."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @property
    def has_rank_gaps(self) -> bool:
        """Whether some node lacks the sibling of the rank before its own."""
        nodes = set(self.paths)
        return any(path[-1] and (*path[:-1], path[-1] - 1) not in nodes for path in self.paths)

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path; an accepted path has A = depth + 1 slots."""
        return max(map(len, self.paths), default=0)

    def levels_within(self, max_depth: int | None) -> int:
        """Return how many levels a head drafts; a static tree is drafted as a whole."""
        return self.depth

    def levels(self) -> list[Level]:
        """Return the levels below the root, nearest first."""
        # Nodes stay in slot order; `parent` is an index into the expanded nodes of the level above.
        # Only nodes with children cost a recurrent step, so levels index those.
        levels: list[Level] = []
        expanded_above: list[tuple[int, ...]] = [()]
        parents = {path[:-1] for path in self.paths}

        for depth in range(1, self.depth + 1):
            nodes = [path for path in self.paths if len(path) == depth]
            expanded = [i for i, path in enumerate(nodes) if path in parents]
            levels.append(
                Level(
                    parent=np.array([expanded_above.index(path[:-1]) for path in nodes]),
                    rank=np.array([path[-1] for path in nodes]),
                    expanded=np.array(expanded, np.int64),
                )
            )
            expanded_above = [nodes[i] for i in expanded]
        return levels

    def parents(self) -> np.ndarray:
        """Return [T] the slot of each slot's parent, -1 at the root.

        Example: chain:2 gives [-1, 0, 1].
        """
        # The root is slot 0, and path i slot i + 1.
        slot = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        return np.array([-1, *(slot[path[:-1]] for path in self.paths)], np.int32)

    def children(self) -> np.ndarray:
        """Return [T, c] the slots of each slot's children in draw order, padded with -1.

        Example: chain:2 gives [[1], [2], [-1]].
        """
        parents = self.parents()
        per_slot = [np.flatnonzero(parents == slot) for slot in range(self.num_slots)]
        children = np.full((self.num_slots, max(map(len, per_slot))), -1, np.int32)
        for slot, found in enumerate(per_slot):
            children[slot, : len(found)] = found
        return children


@dataclasses.dataclass(frozen=True)
class AdaptiveTree(JsonConfig):
    """The bounds of a tree whose shape is chosen at each step; the program depends on these only.

    rule: "dynamic" or "clover4": `tree.draft_dynamic`, `tree.draft_clover4`.
    nodes: drafted nodes at most; T - 1.
    depth: levels at most; clover4 stops earlier where the head cannot go as deep.
    width: nodes expanded on a level at most.
    """

    # The name is not compared: trees with equal bounds share one compiled program.
    name: str = dataclasses.field(compare=False)
    rule: str
    nodes: int
    depth: int
    width: int

    def __post_init__(self):
        if min(self.nodes, self.depth, self.width) < 1:
            raise UserError(
                f"tree {self.name!r}: nodes ({self.nodes}), depth ({self.depth}) and width "
                f"({self.width}) must be at least 1"
            )
        # The dynamic rule picks `nodes` of its pool; clover4 may leave nodes unused.
        if self.rule == "dynamic" and self.nodes > self.pool_size:
            raise UserError(
                f"tree {self.name!r}: {self.depth} levels of width {self.width} draft "
                f"{self.pool_size} nodes, fewer than the {self.nodes} wanted"
            )

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def num_slots(self) -> int:
        return self.nodes + 1

    @property
    def num_ranks(self) -> int:
        return self.width

    def levels_within(self, max_depth: int | None) -> int:
        """Return how deep the tree goes with a head that drafts `max_depth` tokens (None: any)."""
        # Only clover4 stops where the head does; `check_tree` refuses deeper dynamic trees.
        if self.rule != "clover4" or max_depth is None:
            return self.depth
        return min(self.depth, max_depth)

    @property
    def pool_size(self) -> int:
        """Candidates of the dynamic rule: `width` children of every expanded node."""
        # The root alone is expanded on the first level, `width` nodes on each later one.
        return self.width + (self.depth - 1) * self.width**2


@dataclasses.dataclass(frozen=True)
class CopyTree(JsonConfig):
    """A tree with room for copies of the text (`copies.add_copies`).

    drafted: what the head drafts; the root alone where everything is copied.
    copies: additional nodes; the nodes of a static tree stay, an adaptive tree's compete with them.
    """

    name: str = dataclasses.field(compare=False)
    drafted: TreeConfig | AdaptiveTree
    copies: int

    def __post_init__(self):
        # Without copies it would be the drafted tree itself under another name.
        if self.copies < 1:
            raise ValueError(f"tree {self.name!r}: copies ({self.copies}) must be at least 1")

    @property
    def candidates(self) -> TreeConfig | AdaptiveTree:
        """The tree to draft before copies are added; an adaptive one fills all slots."""
        own = self.drafted
        if isinstance(own, TreeConfig):
            return own
        # Where the text has no match, drafted nodes take the slots of copies.
        return dataclasses.replace(own, nodes=min(self.num_nodes, own.pool_size))

    @property
    def num_nodes(self) -> int:
        return self.drafted.num_nodes + self.copies

    @property
    def num_slots(self) -> int:
        return self.num_nodes + 1

    @property
    def num_ranks(self) -> int:
        return self.drafted.num_ranks

    @property
    def depth(self) -> int:
        """Bound of the longest path: all copies may be one chain."""
        return max(self.drafted.depth, self.copies)

    def levels_within(self, max_depth: int | None) -> int:
        """Return how many levels a head drafts: copies may go deeper."""
        return self.drafted.levels_within(max_depth)


Tree = TreeConfig | AdaptiveTree | CopyTree


def with_copies(tree: Tree, copies: int) -> CopyTree:
    """Return the tree with `copies` more nodes, for copies of the text."""
    # A tree that has copies gets another number of them, not copies twice.
    drafted = tree.drafted if isinstance(tree, CopyTree) else tree
    name = f"{drafted.name}+copy:{copies}" if drafted.num_nodes else f"copy:{copies}"
    return CopyTree(name, drafted, copies)


def parse_tree(name: str) -> Tree:
    """Return the tree that a name stands for.

    paper25, chain:P, file:PATH, paths:PATHS and none are static; dynamic:NODES[:DEPTH[:WIDTH]] and
    clover4 follow the draft's probabilities.

    +copy:NODES after a tree's name, or copy:NODES alone, adds nodes that are copied from the text.
    A file holds a JSON list of paths of child ranks: [[0], [1], [0, 0]] is paths:0/1/0.0.
    """
    # Copies, in addition to another tree or alone.
    drafted, _, copies = name.rpartition("copy:")
    if copies.isdecimal() and int(copies) > 0 and (not drafted or drafted.endswith("+")):
        own = parse_tree(drafted[:-1]) if drafted else TreeConfig.root_only()
        # A second +copy: is not a tree; it ends in the error below.
        if not isinstance(own, CopyTree):
            return with_copies(own, int(copies))

    kind, _, argument = name.partition(":")
    # Trees with a fixed name.
    if name == "none":
        return TreeConfig.root_only()
    if name == "paper25":
        return TreeConfig(name, tuple(tuple(map(int, path)) for path in PAPER25.split()))

    # Trees whose paths are listed.
    if kind == "chain" and argument.isdecimal() and int(argument) > 0:
        return TreeConfig(name, tuple((0,) * d for d in range(1, int(argument) + 1)))
    if kind == "file" and argument:
        return _read_tree(name, Path(argument))
    if kind == "paths":
        try:
            paths = [tuple(map(int, path.split("."))) for path in argument.split("/")]
            return TreeConfig(name, tuple(paths))
        except ValueError as error:
            raise UserError(
                f"tree {name!r} must be rank paths like paths:0/1/0.0: {error}"
            ) from error

    # Rules that choose a tree at each step.
    if kind in ("dynamic", "clover4"):
        return parse_adaptive(name)
    raise UserError(
        f"tree {name!r} is unknown; use paper25, chain:P with P >= 1, dynamic:NODES, clover4, "
        "file:PATH, paths:PATHS, copy:NODES, one of these +copy:NODES, or none"
    )


def portable_name(tree: Tree) -> str:
    """Return a name by which `parse_tree` finds the same tree on any machine.

    Example: "file:a.json" with [[0], [0, 2]] in it gives "paths:0/0.2".
    """
    if isinstance(tree, CopyTree):
        own = f"{portable_name(tree.drafted)}+" if tree.drafted.num_nodes else ""
        return f"{own}copy:{tree.copies}"
    # The file may be on one machine only.
    if not tree.name.startswith("file:") or isinstance(tree, AdaptiveTree):
        return tree.name
    return "paths:" + "/".join(".".join(map(str, path)) for path in tree.paths)


def default_tree(max_depth: int | None) -> str:
    """Return the tree for a head that drafts at most `max_depth` tokens (None: any number).

    paper25 where it fits, else clover4, which goes no deeper than the head.
    """
    # paper25 is 5 levels deep.
    return "paper25" if max_depth is None or max_depth >= 5 else "clover4"


def _read_tree(name: str, path: Path) -> TreeConfig:
    try:
        paths = json.loads(path.read_text())
        # Not isinstance for the ranks: JSON's true is an int, too.
        if not (
            isinstance(paths, list)
            and paths
            and all(isinstance(ranks, list) and ranks for ranks in paths)
            and all(type(rank) is int for ranks in paths for rank in ranks)
        ):
            raise ValueError(f"found {str(paths)[:60]}")
        return TreeConfig(name, tuple(map(tuple, paths)))
    except OSError as error:
        raise UserError(f"tree file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"tree file {path} must hold a JSON list of rank paths like [[0], [1], [0, 0]]: {error}"
        ) from error


def parse_adaptive(name: str) -> AdaptiveTree:
    """Return the tree that `dynamic:NODES[:DEPTH[:WIDTH]]` or `clover4` stands for.

    Example: dynamic:3 is 3 levels of width 3; dynamic:25 has the defaults, 6 levels of width 8.
    """
    rule, *numbers = name.split(":")
    if rule == "clover4" and not numbers:
        return AdaptiveTree(name, "clover4", nodes=4, depth=4, width=4)
    if rule != "dynamic" or not 1 <= len(numbers) <= 3 or not all(map(str.isdecimal, numbers)):
        raise UserError(f"tree {name!r} must be dynamic:NODES[:DEPTH[:WIDTH]], as in dynamic:25")
    nodes, *bounds = map(int, numbers)
    # Of N nodes none lies below level N or has a rank of N or more: a kept node's ancestors and
    # earlier siblings score no less, so they are kept too.
    defaults = [max(1, min(most, nodes)) for most in (DEFAULT_DEPTH, DEFAULT_WIDTH)]
    depth, width = bounds + defaults[len(bounds) :]
    return AdaptiveTree(name, "dynamic", nodes, depth, width)
