"""The one step: absorb accepted tokens, draft a tree, verify it, accept a path, commit it.

Nothing leaves the device within a step; `chunk.py` has what the host reads between steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.accept import (
    Accepted,
    accept_forced,
    accept_path,
    accept_typical,
    finite_log_softmax,
)
from clover_jax.decoding.adaptive_tree import AdaptiveTree
from clover_jax.decoding.cache_reading import reading
from clover_jax.decoding.commit import StepRecord, commit
from clover_jax.decoding.copies import add_copies, count_copies, guessed_scores
from clover_jax.decoding.draft import (
    SUPPORT,
    ChooseChildren,
    Drafted,
    draft,
    sample_children,
    top_children,
)
from clover_jax.decoding.draft_adaptive import draft_adaptive
from clover_jax.decoding.lossless import accept_drawn, accept_sampled
from clover_jax.decoding.sampling import add_bias, warp
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig
from clover_jax.decoding.scores import score
from clover_jax.decoding.state import RUNNING, DecodeState, searched
from clover_jax.decoding.tree import CopyTree, TokenTree, Tree, TreeConfig
from clover_jax.decoding.verify import tree_choices, verify
from clover_jax.drafters.drafter import (
    PAD_TOKEN,
    AcceptedPositions,
    DraftCache,
    frozen_from_base,
    select_features,
    with_draft_rows,
)
from clover_jax.drafters.registry import TRAINING_FREE, DraftHead
from clover_jax.errors import UserError
from clover_jax.models.cache import Cache
from clover_jax.models.decoder import base_logits
from clover_jax.sharding.placement import by_rows, gathered_in_use
from clover_jax.sharding.top_k import argmax

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """All that is fixed when a step is compiled: equal configs share one program.

    head: None for plain decoding, with the tree that has no nodes.
    attention: implementation that reads the KV cache, "xla", "pallas" or "cudnn".
    """

    base: BaseConfig
    head: DraftHead | None
    tree: Tree
    sampling: SamplingConfig = GREEDY
    attention: str = "xla"

    def __post_init__(self):
        # Plain decoding is a step whose tree has no nodes; everything else drafts.
        if (self.head is None) != (self.tree.num_nodes == 0):
            raise UserError(
                f"tree {self.tree.name!r} has {self.tree.num_nodes} nodes and there is "
                f"{'no' if self.head is None else 'a'} draft head: nodes need a head"
            )
        if self.head is not None:
            check_tree(self.head, self.tree)
        if self.sampling.draft_sampling == "sampled":
            self._check_draws()

    def _check_draws(self) -> None:
        if isinstance(self.tree, CopyTree):
            raise UserError(
                f"tree {self.tree.name!r} has copies, which are no draws from the draft: use "
                "draft_sampling topk, or a tree without copies"
            )
        # Scores of these heads come from a fixed table of guesses: no distribution to draw from.
        if self.head is not None and self.head.config.kind in TRAINING_FREE:
            raise UserError(
                f"{self.head.config.kind} has no distribution to draw children from: use "
                "draft_sampling topk, whose text has the base's distribution too"
            )
        if isinstance(self.tree, AdaptiveTree):
            raise UserError(
                f"tree {self.tree.name!r} is chosen by probability, so its children are no draws: "
                "use draft_sampling topk, or a static tree with sampled"
            )
        if self.tree.has_rank_gaps:
            # The second draw, verified as if it were the first, would change the distribution.
            raise UserError(
                f"tree {self.tree.name!r} leaves out some node's earlier siblings: with "
                "draft_sampling sampled a rank is a draw, and no draw may be passed over"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """The base activations that the head reads."""
        return self.head.config.features if self.head else ()


def check_tree(head: DraftHead, tree: Tree) -> None:
    """Raise UserError for a tree that the head cannot draft: too deep, or too wide."""
    config = head.config
    if isinstance(tree, CopyTree):
        tree = tree.drafted  # copies go as deep as they like

    # `clover4` cuts its depth to the head's; its width is checked below all the same.
    depth = tree.levels_within(config.max_depth)
    if config.max_depth is not None and depth > config.max_depth:
        raise UserError(
            f"tree {tree.name!r} is {depth} deep; this {config.kind} head drafts at most "
            f"{config.max_depth} tokens, one for each position it was trained for: use "
            f"clover4, chain:{config.max_depth} or dynamic:NODES:{config.max_depth}, or train more "
            "positions"
        )
    # A node's children are the draft's top k tokens, and k cannot exceed its vocabulary.
    if tree.num_ranks > config.draft_vocab_size:
        raise UserError(
            f"tree {tree.name!r} looks at {tree.num_ranks} children of a node and the draft's "
            f"vocabulary has {config.draft_vocab_size} tokens"
        )


class Weights(struct.PyTreeNode):
    """The parameters of a step: the frozen base's and the head's ({} without a head)."""

    base: Params
    draft: Params


class Verified(struct.PyTreeNode):
    """What one base forward gives for every slot.

    choices: [B, T] the most probable token after each slot; None where the rule needs logits.
    logits: [B, T, V] of the token after each slot; None where `choices` are enough.
    fresh: keys and values of the slots.
    features: [B, T, F] what the head will read of them.
    """

    choices: Int[Array, "B T"] | None
    logits: Float[Array, "B T V"] | None
    fresh: Cache
    features: Float[Array, "B T F"]


def weights_for(
    head: DraftHead | None, base_params: Params, draft_params: Params | None
) -> Weights:
    """Return the weights for the steps of a head, with the lm_head rows of its vocabulary."""
    # Rows are gathered here, once: within the step it would happen at every step.
    if head is not None and head.module.reads_lm_head:
        base_params = with_draft_rows(base_params, head.config)
    return Weights(base_params, draft_params if draft_params is not None else {})


def reads_caches(stage: Callable[..., Result]) -> Callable[..., Result]:
    """Trace a stage so that it reads KV caches by the `attention` of its config."""

    @functools.wraps(stage)
    def run(config: StepConfig, *arguments: Any) -> Result:
        # A context variable that attention looks up, so that no layer has to pass it on.
        with reading(config.attention):
            return stage(config, *arguments)

    return run


def speculate_and_verify(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Advance every running row by its accepted path and one bonus token."""
    # The head first reads what the last step accepted; plain decoding has no head.
    root = roots(state)
    if config.head is None:
        drafted = Drafted(TokenTree.root_only(root))
    else:
        state, drafted = absorb_and_draft(config, weights, state, root)

    # One base forward judges the whole tree, and its keys and values wait beside the cache.
    with jax.named_scope("verify"):
        verified = verify_tree(config, weights, state, drafted.tree)
    with jax.named_scope("accept"):
        accepted = accept(config, state, drafted, verified)

    # The head may observe every slot; only the accepted path enters the KV cache.
    with jax.named_scope("commit"):
        state = observe_verified(config, weights, state, drafted.tree, verified)
        slots = drafted.tree, accepted, verified.fresh, verified.features
        state, record = commit(state, *slots, by_kernel=config.attention == "pallas")
        if config.sampling.scored:
            # The tokens after the path's slots are the accepted ones and the bonus.
            assert verified.logits is not None  # `needs_choices_only` is False for scored steps
            on_path = jnp.take_along_axis(verified.logits, accepted.path[..., None], axis=1)
            record = record.replace(scores=score(on_path, state.next_tokens))
        if drafted.copy is not None and state.copies is not None:
            # The best copy is counted in every step, whether it got slots or not.
            counted = count_copies(state.copies, drafted.copy, state.next_tokens, state.count)
            state = state.replace(copies=counted)
        return state, record


def roots(state: DecodeState) -> Int[Array, " B"]:
    """Return each row's root: the token that was emitted last and is not in the KV cache yet."""
    return jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]


def absorb_and_draft(
    config: StepConfig, weights: Weights, state: DecodeState, root: Int[Array, " B"]
) -> tuple[DecodeState, Drafted]:
    """Update the draft cache with what the last step accepted, and draft a tree under `root`."""
    weights = gathered_in_use(weights)
    with jax.named_scope("absorb"):
        head_state, cache = absorb_pending(config, weights, state)
    state = state.replace(draft_cache=cache)
    with jax.named_scope("draft"):
        return state, draft_tree(config, weights, state, root, head_state)


@reads_caches
def absorb_pending(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[Any, DraftCache]:
    """Return the head's root state and the draft cache after the positions accepted last."""
    assert config.head is not None  # plain decoding drafts nothing
    # Attention reads as far as the longest row of the batch: an ended row counts as empty, as in
    # `verify_tree`. What it absorbs then lands on the first positions of its draft cache;
    # `state.extract` restores them.
    start = jnp.where(state.finish == RUNNING, state.length - state.count, 0)
    accepted = AcceptedPositions(
        state.features, state.next_tokens, start, state.count, searched(state, state.length)
    )
    frozen = frozen_from_base(weights.base)
    return config.head.apply(weights.draft, "absorb", frozen, accepted, state.draft_cache)


@reads_caches
def draft_tree(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    root: Int[Array, " B"],
    head_state: Any,
) -> Drafted:
    """Grow the tree from the head's state at the root; `state` has its draft cache updated."""
    assert config.head is not None  # plain decoding drafts nothing
    frozen, head_tree = frozen_from_base(weights.base), config.tree
    if isinstance(head_tree, CopyTree):
        head_tree = head_tree.candidates

    # What the head drafts itself, with the log of each node's probability to be accepted.
    head = (config.head, weights.draft, frozen, root, head_state, state.draft_cache)
    if isinstance(head_tree, AdaptiveTree):
        tree, node_scores = draft_adaptive(*head, head_tree)
        drafted = Drafted(tree)
    else:
        drafted = draft(*head, head_tree, _children(config, head_tree, state))
        node_scores = guessed_scores(head_tree)
    if not isinstance(config.tree, CopyTree):
        return drafted

    assert state.copies is not None  # as for every tree with copies
    copied, best = add_copies(
        drafted.tree,
        jnp.broadcast_to(node_scores, drafted.tree.tokens.shape),
        searched(state, state.length),
        state.length,
        state.copies,
        nodes=config.tree.num_nodes,
        depth=config.tree.depth,
        keep_drafted=isinstance(head_tree, TreeConfig),
    )
    return Drafted(copied, copy=best)


def _children(config: StepConfig, tree: TreeConfig, state: DecodeState) -> ChooseChildren:
    """Return the choice of children that the config names: by probability, or drawn."""
    assert config.head is not None  # as in `draft_tree`
    if config.sampling.draft_sampling != "sampled":
        return top_children
    # q has room for at least the children that the tree wants.
    support = min(max(SUPPORT, tree.num_ranks), config.head.config.draft_vocab_size)
    # The root stands at `length`, the nodes of level d = 1, 2, .. at length + d.
    positions = state.length[:, None] + 1 + jnp.arange(tree.depth)
    return sample_children(state.sampling, positions, config.sampling.truncate, support)


@reads_caches
def verify_tree(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree
) -> Verified:
    """Run the base over every slot of the tree."""
    weights = gathered_in_use(weights)
    # Attention reads as far as the longest row of the batch: an ended row counts as empty.
    length = jnp.where(state.finish == RUNNING, state.length, 0)
    output = verify(config.base, weights.base, tree, state.cache, length)
    features = tree_features(config, output.hidden)
    if config.sampling.needs_choices_only:
        # Only choices leave this stage, so that a device need not store the logits.
        return Verified(tree_choices(weights.base, output), None, output.fresh, features)
    logits = base_logits(config.base, weights.base, output.hidden["post_norm"])
    return Verified(None, logits, output.fresh, features)


def observe_verified(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree, verified: Verified
) -> DecodeState:
    """Give the base's choices after the slots of running rows to a head that has `observe`."""
    if config.head is None or not config.head.module.observes:
        return state
    choices = verified.choices
    # Where the rule reads all logits, `verify_tree` has left the choices out.
    if choices is None:
        assert verified.logits is not None  # one of the two is there
        choices = argmax(verified.logits)
    # An ended row is verified with the others, but its tokens are not part of a text.
    valid = (tree.tokens != PAD_TOKEN) & (state.finish == RUNNING)[:, None]
    cache = config.head.apply(
        weights.draft, "observe", state.draft_cache, tree.tokens, choices, valid
    )
    return state.replace(draft_cache=cache)


def accept(
    config: StepConfig, state: DecodeState, drafted: Drafted, verified: Verified
) -> Accepted:
    """Apply the verification rule that the config names."""
    sampling, tree = config.sampling, drafted.tree
    # Rules that read the most probable tokens alone come first: there are no logits then.
    if sampling.force_accept is not None:
        return accept_forced(tree, verified.choices, sampling.force_accept)
    if sampling.needs_choices_only:
        return accept_path(tree, verified.choices)
    logits = verified.logits
    assert logits is not None  # `verify_tree` gives them to all further rules
    if sampling.biased:
        # A slot's logits predict the token at the next position.
        positions = state.length[:, None] + 1 + tree.level()
        logits = add_bias(logits, state.sampling, state.eos, positions)
    if sampling.verify == "greedy":
        # Greedy with biases: the largest logit after they were added.
        return accept_path(tree, argmax(logits))
    # Typical acceptance judges drafted tokens; plain decoding has none and draws as usual.
    if sampling.verify == "typical" and config.head is not None:
        log_probability = finite_log_softmax(warp(logits, state.sampling, sampling.truncate))
        return accept_typical(
            tree, log_probability, sampling.typical_epsilon, sampling.typical_delta
        )
    # Lossless: children chosen by rank are verified by one draw, sampled ones by their q.
    rows, truncate, length = state.sampling, sampling.truncate, state.length
    if drafted.drafts is None:
        return accept_drawn(tree, logits, rows, length, truncate)
    assert isinstance(config.tree, TreeConfig)  # StepConfig refuses draws of others
    return accept_sampled(config.tree, tree, drafted.drafts, logits, rows, length, truncate)


def tree_features(config: StepConfig, hidden: dict[str, Array]) -> Array:
    """Return the base's activations that the head reads: [B, T, F], F = 0 without a head."""
    if not config.features:
        # No head, or one that reads no features: the state keeps the leaf, with width 0.
        return hidden["post_norm"][..., :0]
    return by_rows(select_features(hidden, config.features))
