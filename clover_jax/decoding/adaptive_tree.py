"""Trees that follow the draft's own probabilities: another shape for each row and step."""

from __future__ import annotations

import dataclasses

from clover_jax.config import JsonConfig
from clover_jax.errors import UserError

AUTO = "auto"  # the fastest of a few trees, measured: tree_search/race.py
# EAGLE-2 expands 10 nodes on each of 7 levels; a level of Clover costs a pass over lm_head, so
# fewer pay. Both can be given: dynamic:NODES:DEPTH:WIDTH. Fewer nodes than these use less of them.
DEFAULT_DEPTH, DEFAULT_WIDTH = 6, 8


@dataclasses.dataclass(frozen=True)
class AdaptiveTree(JsonConfig):
    """The bounds of a tree whose shape is chosen at each step; the program depends on these only.

    rule: "dynamic" or "clover4", see draft_adaptive.py.
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
        """Drafted nodes, the root not counted."""
        return self.nodes

    @property
    def num_slots(self) -> int:
        """T: drafted nodes and the root."""
        return self.nodes + 1

    @property
    def num_ranks(self) -> int:
        """Children of one node that are looked at."""
        return self.width

    def levels_within(self, max_depth: int | None) -> int:
        """Return how deep the tree goes with a head that drafts `max_depth` tokens (None: any)."""
        # Only clover4 stops where the head does; `check_tree` refuses a dynamic tree that is too
        # deep.
        if self.rule != "clover4" or max_depth is None:
            return self.depth
        return min(self.depth, max_depth)

    @property
    def pool_size(self) -> int:
        """Nodes that the dynamic rule looks at: `width` children of every expanded node."""
        # The root alone is expanded on the first level, `width` nodes on each later one.
        return self.width + (self.depth - 1) * self.width**2


def parse_adaptive(name: str) -> AdaptiveTree:
    """Return the tree that `dynamic:NODES[:DEPTH[:WIDTH]]` or `clover4` stands for.

    Example: dynamic:3 is 3 levels of width 3; dynamic:25 has the defaults, 6 levels of width 8.
    """
    # What is left out takes its default.
    rule, *numbers = name.split(":")
    if rule == "clover4" and not numbers:
        return AdaptiveTree(name, "clover4", nodes=4, depth=4, width=4)
    if rule != "dynamic" or not 1 <= len(numbers) <= 3 or not all(map(str.isdecimal, numbers)):
        raise UserError(f"tree {name!r} must be dynamic:NODES[:DEPTH[:WIDTH]], as in dynamic:25")
    nodes, *given = map(int, numbers)
    # A kept node's ancestors are kept, and so are its earlier siblings and what its level expands
    # before it, which score no less: beyond N levels, children or expanded nodes nothing is kept.
    defaults = [max(1, min(most, nodes)) for most in (DEFAULT_DEPTH, DEFAULT_WIDTH)]
    depth, width = given + defaults[len(given) :]
    return AdaptiveTree(name, "dynamic", nodes, depth, width)
