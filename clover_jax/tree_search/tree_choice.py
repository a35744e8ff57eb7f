"""Choose trees that may be faster, from a table of costs and samples of acceptance.

`choose_tree` is a pure function of both. A sample is a position of the text: the rank that the head
gave to each of the next tokens, teacher-forced with the ones before it. A static tree accepts as
far as these ranks are a path of it, so samples give the accepted length of any tree without
assuming that levels are independent.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from clover_jax.config import JsonConfig
from clover_jax.decoding.tree_config import (
    AUTO,
    AdaptiveTree,
    Tree,
    TreeConfig,
    parse_adaptive,
    with_copies,
)

MOST_NODES = 127
MOST_FINALISTS = 2
COPIES = (8, 16)  # nodes for copies that are tried beside or instead of what is drafted
MOST_WIDTH = 8  # of an adaptive level; a wider one was not measured
WORTH_A_TRIAL = 0.8  # of plain decoding: parts timed apart are not that exact
Points = tuple[tuple[int, float], ...]  # (size, seconds) pairs, sizes ascending


@dataclasses.dataclass(frozen=True)
class CostTable(JsonConfig):
    """Seconds on one machine, for one base, drafter, batch size and context.

    plain: a step of plain decoding, everything included.
    verify: (tree slots, seconds) of the base's forward.
    first: absorbing the accepted tokens and proposing the root's children.
    level: (expanded nodes, seconds) of going one level down and proposing there.
    rest: accepting and committing.
    """

    plain: float
    verify: Points
    first: float
    level: Points
    rest: float

    def step(self, tree: TreeConfig) -> float:
        """Return the seconds of a speculative step with a tree."""
        # A level's cost depends on how many of its nodes are expanded; the deepest expands none.
        widths = [level.expanded.size for level in tree.levels()]
        levels = sum(_between(self.level, width) for width in widths if width)
        verify = _between(self.verify, tree.num_slots)
        return self.first + levels + verify + self.rest


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best tree by costs and ranks.

    tree: the one without nodes where plain decoding is faster.
    accepted: drafted tokens that a step is expected to accept.
    seconds: of a step. speed_up: tokens a second over those of plain decoding.
    considered: the best tree of each depth, the chosen one among them.
    """

    tree: TreeConfig
    accepted: float
    seconds: float
    speed_up: float
    considered: tuple[Choice, ...] = ()


def choose_tree(costs: CostTable, ranks: np.ndarray, *, gaps: bool = True) -> Choice:
    """Return the static tree with the most tokens a second.

    ranks: [samples, depth] rank of the true token at each level; negative where the head could not
        have proposed it.
    gaps: whether a node may lack the sibling of the rank before its own; sampled children must not.
    For every depth, the best tree of n nodes holds the n paths that occur most often: a path is
    never more frequent than its beginning, so every path's beginning is in it too. Without gaps a
    path needs its earlier siblings, however rare these are.
    """
    depths = range(1, ranks.shape[1] + 1) if len(ranks) else ()
    best = [_best_of_depth(costs, ranks, depth, gaps) for depth in depths]
    considered = tuple(choice for choice in best if choice is not None)
    fastest = max(considered, key=lambda choice: choice.speed_up, default=None)
    # What is considered is kept: a trial may try trees that by their parts just fail to pay.
    if fastest is None or fastest.speed_up <= 1:
        return Choice(TreeConfig.root_only(), 0.0, costs.plain, 1.0, considered)
    return dataclasses.replace(fastest, considered=considered)


def _best_of_depth(costs: CostTable, ranks: np.ndarray, depth: int, gaps: bool) -> Choice | None:
    # Each tree is the one before plus the next most frequent path, so accepted tokens add up.
    counts = _path_counts(ranks, depth)
    order = _most_frequent(counts, gaps)[:MOST_NODES]
    best, accepted = None, 0.0
    for size, path in enumerate(order, start=1):
        accepted += counts[path] / len(ranks)
        tree = TreeConfig(AUTO, tuple(order[:size]))
        seconds = costs.step(tree)
        # A step emits the accepted tokens and the base's own next one.
        speed_up = (1 + accepted) / seconds * costs.plain
        # A shallower tree was looked at with its own depth.
        if tree.depth == depth and (best is None or speed_up > best.speed_up):
            best = Choice(tree, accepted, seconds, speed_up)
    return best


def _most_frequent(counts: collections.Counter[tuple[int, ...]], gaps: bool) -> list:
    """Return the paths in the order in which a tree takes them in; see `choose_tree`.

    Example: of counts {(0,): 3, (2,): 2} with gaps (0,), (2,) and without (0,), (1,), (2,).
    """
    # Of equal counts the shorter path first, so that a path's beginning comes before the path.
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    if gaps:
        return order
    # Without gaps a path brings its earlier siblings, which come before it.
    filled = ((*path[:-1], rank) for path in order for rank in range(path[-1] + 1))
    return list(dict.fromkeys(filled))


def _path_counts(ranks: np.ndarray, depth: int) -> collections.Counter[tuple[int, ...]]:
    """Return how many samples begin with each path of ranks, up to a depth."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    for row in ranks[:, :depth].tolist():
        # Nothing below a token that the head missed is ever reached.
        misses = [level for level, rank in enumerate(row) if rank < 0]
        for length in range(1, (misses[0] if misses else len(row)) + 1):
            counts[tuple(row[:length])] += 1
    return counts


def _between(points: Points, size: float) -> float:
    """Return the seconds at a size between measured ones; beyond the last in proportion to it."""
    sizes, seconds = zip(*points, strict=True)
    if size > sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return float(np.interp(size, sizes, seconds))


def finalists(choice: Choice, *, by_rank: bool, only_copies: bool = False) -> list[Tree]:
    """Return the trees to time in a trial, the most promising first.

    by_rank: whether the children are chosen by probability, not drawn. A dynamic tree as large as
        the best static one costs about as much and is tried too, and so are copies beside either:
        samples of ranks do not tell how many tokens these would have accepted.
    only_copies: whether the head only copies.
    """
    worth = [other for other in choice.considered if other.speed_up > WORTH_A_TRIAL]
    best = sorted(worth, key=lambda other: -other.speed_up)[:MOST_FINALISTS]
    # A sum of parts orders trees roughly, so more than one gets a run.
    trees: list[Tree] = [other.tree for other in best]
    if by_rank and trees:
        trees.append(dynamic_like(best[0].tree))
        if not only_copies:
            trees += [with_copies(tree, COPIES[0]) for tree in (trees[0], trees[-1])]
    if only_copies:
        trees += [with_copies(TreeConfig.root_only(), copies) for copies in COPIES]
    return trees


def dynamic_like(tree: TreeConfig) -> AdaptiveTree:
    """Return the dynamic tree of as many nodes and levels, as wide as the widest level.

    Example: paper25 expands 4 nodes of a level and looks at 4 children at most: dynamic:25:5:4.
    """
    sizes = [max(level.expanded.size, int(level.rank.max()) + 1) for level in tree.levels()]
    width = min(max(sizes), MOST_WIDTH)
    # A dynamic tree cannot keep more nodes than it drafts (`AdaptiveTree.pool_size`).
    nodes = min(tree.num_nodes, width + (tree.depth - 1) * width**2)
    return parse_adaptive(f"dynamic:{nodes}:{tree.depth}:{width}")


def describe_prospects(choice: Choice, costs: CostTable) -> list[str]:
    """Return a table of the considered trees, by the times of parts of steps."""
    lines = [f"by the parts of a step, timed apart; a plain step takes {1e3 * costs.plain:.2f} ms"]
    lines.append(f"{'depth':>5}{'nodes':>7}{'accepted':>10}{'step ms':>9}{'speed-up':>10}")
    for other in choice.considered:
        lines.append(
            f"{other.tree.depth:>5}{other.tree.num_nodes:>7}{other.accepted:>10.2f}"
            f"{1e3 * other.seconds:>9.2f}{other.speed_up:>10.2f}"
        )
    return lines
