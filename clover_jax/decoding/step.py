"""The one step: absorb accepted tokens, draft a tree, verify it, accept a path, commit it.

Nothing leaves the device within a step or within a chunk of steps; the host reads in between.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.commit import StepRecord, commit
from clover_jax.decoding.draft import draft
from clover_jax.decoding.state import DecodeState
from clover_jax.decoding.tree import TokenTree, TreeConfig
from clover_jax.decoding.verify import accept_greedy, greedy_tokens, verify
from clover_jax.drafters.drafter import frozen_from_base, select_features
from clover_jax.drafters.registry import DraftHead


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything static of a step: equal configs share one compiled program.

    head: None for plain decoding, with the tree that has no nodes.
    """

    base: BaseConfig
    head: DraftHead | None
    tree: TreeConfig

    def __post_init__(self):
        if (self.head is None) != (self.tree.num_nodes == 0):
            raise ValueError(
                f"tree {self.tree.name!r} has {self.tree.num_nodes} nodes and there is "
                f"{'no' if self.head is None else 'a'} draft head: nodes need a head"
            )
        deepest = self.head.config.max_depth if self.head else None
        if deepest is not None and self.tree.depth > deepest:
            raise ValueError(
                f"tree {self.tree.name!r} is {self.tree.depth} deep; a {self.head.config.kind} "
                f"head drafts at most {deepest} tokens"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """The base activations that the head reads."""
        return self.head.config.features if self.head else ()


@struct.dataclass
class Weights:
    """The parameters of a step: the frozen base's and the head's ({} without a head)."""

    base: Params
    draft: Params


def speculate_and_verify(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Advance every running row by its accepted path and one bonus token."""
    root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
    depth = config.tree.depth
    if config.head is None:
        tree = TokenTree(tokens=root[:, None], parent=jnp.full((root.shape[0], 1), -1))
    else:
        state, tree = _absorb_and_draft(config, weights, state, root)
    with jax.named_scope("verify"):
        output = verify(config.base, weights.base, tree, depth, state.cache, state.length)
        best = greedy_tokens(weights.base, output)
    with jax.named_scope("accept"):
        accepted = accept_greedy(tree, best, depth)
    with jax.named_scope("commit"):
        features = tree_features(config, output.hidden)
        return commit(state, tree, accepted, output.fresh, features)


def _absorb_and_draft(
    config: StepConfig, weights: Weights, state: DecodeState, root: Int[Array, " B"]
) -> tuple[DecodeState, TokenTree]:
    head, frozen = config.head, frozen_from_base(weights.base)
    with jax.named_scope("absorb"):
        draft_state, draft_cache = head.module.apply(
            {"params": weights.draft},
            frozen,
            state.features,
            state.next_tokens,
            state.length - state.count,
            state.count,
            state.draft_cache,
            method="absorb",
        )
    with jax.named_scope("draft"):
        tree = draft(head, weights.draft, frozen, root, draft_state, draft_cache, config.tree)
    return state.replace(draft_cache=draft_cache), tree


def tree_features(config: StepConfig, hidden: dict[str, Array]) -> Array:
    """Return what the head reads of the base's activations: [B, T, F], F = 0 without a head."""
    if not config.features:
        return hidden["post_norm"][..., :0]
    return select_features(hidden, config.features)


def decode_chunk(
    config: StepConfig, num_steps: int, weights: Weights, state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Run a fixed number of steps on the device; records have a leading [num_steps].

    A known trip count: a loop that ends when all rows have finished would make a GPU ask the
    host at every iteration. Finished rows do not change.
    """

    def body(state: DecodeState, _: None) -> tuple[DecodeState, StepRecord]:
        return speculate_and_verify(config, weights, state)

    return jax.lax.scan(body, state, length=num_steps)
