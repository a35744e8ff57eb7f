"""Token trees: which nodes a draft proposes, as data.

Slot 0 of a tree is the root, the last emitted token, which is not in the KV cache yet. The other
slots are drafted nodes, parents before children, levels one after another. A static tree is given
by paths of child ranks: (0, 1) is the second most probable child of the root's most probable one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct

from clover_jax.array_types import Array, Bool, Int, typed
from clover_jax.config import JsonConfig
from clover_jax.decoding.adaptive_tree import AdaptiveTree, parse_adaptive
from clover_jax.errors import UserError

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
        """Return the tree without drafted nodes: plain decoding."""
        return cls("none")

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.paths)

    @property
    def num_slots(self) -> int:
        """T: drafted nodes and the root."""
        return len(self.paths) + 1

    @property
    def num_ranks(self) -> int:
        """Children of one node that are looked at: the largest rank and those before it."""
        # Plain decoding looks at no child.
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


class TokenTree(struct.PyTreeNode):
    """A drafted tree per batch row, parents before children.

    tokens: [B, T] the root and the drafted tokens; PAD_TOKEN in unused slots.
    parent: [B, T] slot of the parent, -1 at the root; [1, T] where all rows share one shape.
    depth: bound of its height; an accepted path has A = depth + 1 slots.
    copied: [B, T] whether a node was copied from the text; None where nothing is copied.
    """

    tokens: Int[Array, "B T"]
    parent: Int[Array, "B T"]
    depth: int = struct.field(pytree_node=False)
    copied: Bool[Array, "B T"] | None = None

    @classmethod
    def root_only(cls, root: Int[Array, " B"]) -> TokenTree:
        """Return the tree of one slot for each row."""
        # All rows share one `parent` row, so masks made from it are constants of the program.
        return cls(root[:, None], jnp.full((1, 1), -1), depth=0)

    def mask(self) -> Bool[Array, "B T T"]:
        """Return [b, t, s] True where slot t may attend to slot s: itself or an ancestor."""
        return ancestor_mask(self.parent, self.depth)

    def level(self) -> Int[Array, "B T"]:
        """Return the distance of each slot from the root."""
        return node_depth(self.mask())


@dataclasses.dataclass(frozen=True)
class CopyTree(JsonConfig):
    """A tree with room for copies of the text: see copies.py.

    drafted: what the head drafts; the root alone where everything is copied.
    copies: nodes beside those. A static tree keeps its own; an adaptive one and the copies compete
        for the nodes of both.
    """

    name: str = dataclasses.field(compare=False)
    drafted: TreeConfig | AdaptiveTree
    copies: int

    def __post_init__(self):
        # Without copies it is the drafted tree itself, by another name.
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
        """Drafted and copied nodes, the root not counted."""
        return self.drafted.num_nodes + self.copies

    @property
    def num_slots(self) -> int:
        """T: drafted and copied nodes and the root."""
        return self.num_nodes + 1

    @property
    def num_ranks(self) -> int:
        """Children of one drafted node that are looked at."""
        return self.drafted.num_ranks

    @property
    def depth(self) -> int:
        """Tokens on the longest path at most: all copies may be one chain."""
        return max(self.drafted.depth, self.copies)

    def levels_within(self, max_depth: int | None) -> int:
        """Return how many levels a head drafts: copies may go deeper."""
        return self.drafted.levels_within(max_depth)


Tree = TreeConfig | AdaptiveTree | CopyTree


def with_copies(tree: Tree, copies: int) -> CopyTree:
    """Return the tree with room for `copies` copied nodes beside the drafted ones."""
    # A tree that has copies gets another number of them, not copies twice.
    drafted = tree.drafted if isinstance(tree, CopyTree) else tree
    name = f"{drafted.name}+copy:{copies}" if drafted.num_nodes else f"copy:{copies}"
    return CopyTree(name, drafted, copies)


def parse_tree(name: str) -> Tree:
    """Return the tree that a name stands for.

    paper25, chain:P, file:PATH, paths:PATHS and none are static; dynamic:NODES[:DEPTH[:WIDTH]] and
    clover4 follow the draft's probabilities.

    A tree with +copy:NODES behind it, or copy:NODES alone, has room for copies of the text.

    A file holds a JSON list of paths, each a list of child ranks: [[0], [1], [0, 0]], which are
    paths:0/1/0.0 as well.
    Raises UserError for an unknown name, unusable paths or an unusable file.
    """
    # Copies beside another tree, or alone.
    drafted, _, copies = name.rpartition("copy:")
    if copies.isdecimal() and int(copies) > 0 and (not drafted or drafted.endswith("+")):
        own = parse_tree(drafted[:-1]) if drafted else TreeConfig.root_only()
        # A second +copy: is no tree, and ends in the error below.
        if not isinstance(own, CopyTree):
            return with_copies(own, int(copies))

    kind, _, argument = name.partition(":")
    # Trees with a fixed name.
    if name == "none":
        return TreeConfig.root_only()
    if name == "paper25":
        return TreeConfig(name, tuple(tuple(map(int, path)) for path in PAPER25.split()))

    # Trees that are spelt out.
    if kind == "chain" and argument.isdecimal() and int(argument) > 0:
        return TreeConfig(name, tuple((0,) * d for d in range(1, int(argument) + 1)))
    if kind == "file" and argument:
        return _read_tree(name, Path(argument))
    if kind == "paths":
        return _spelt_tree(name, argument)

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
        if not (isinstance(paths, list) and paths and all(map(_is_path, paths))):
            raise ValueError(f"found {str(paths)[:60]}")
        return TreeConfig(name, tuple(map(tuple, paths)))
    except OSError as error:
        raise UserError(f"tree file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"tree file {path} must hold a JSON list of rank paths like [[0], [1], [0, 0]]: {error}"
        ) from error


def _spelt_tree(name: str, paths: str) -> TreeConfig:
    try:
        return TreeConfig(name, tuple(tuple(map(int, p.split("."))) for p in paths.split("/")))
    except ValueError as error:
        raise UserError(f"tree {name!r} must be rank paths like paths:0/1/0.0: {error}") from error


def _is_path(value: Any) -> bool:
    # Not isinstance: JSON's true is an int, too.
    return isinstance(value, list) and bool(value) and all(type(rank) is int for rank in value)


@typed
def ancestor_mask(parent: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """Return [b, t, s] True where s is t or an ancestor of t; `depth` bounds the tree's height.

    Example: parent [[-1, 0, 1, 0]] gives rows [T,F,F,F], [T,T,F,F], [T,T,T,F], [T,F,F,T].
    """
    # Begin with each slot itself, then climb one level at a time.
    slots = jnp.arange(parent.shape[1])
    mask = jnp.broadcast_to(slots[:, None] == slots, (*parent.shape, parent.shape[1]))
    above = parent
    for _ in range(depth):
        mask |= above[..., None] == slots  # -1, above the root, equals no slot
        further = jnp.take_along_axis(parent, jnp.maximum(above, 0), axis=1)
        above = jnp.where(above < 0, -1, further)
    return mask


@typed
def node_depth(mask: Bool[Array, "B T T"]) -> Int[Array, "B T"]:
    """Return the depth of each slot, 0 at the root, from its ancestor mask."""
    # A slot sees itself and one ancestor for each level above.
    return mask.sum(axis=-1, dtype=jnp.int32) - 1
