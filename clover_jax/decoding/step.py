"""The one step: absorb accepted tokens, draft a tree, verify it, accept a path, commit it.

`speculate_and_verify` calls the five stages, and this file has them in that order. `tree.py` has
the trees that `draft` grows, `accept.py` the rules that `accept` applies. Nothing leaves the device
within a step, but for the tree of rows with a form, whose masks the host makes (`programs.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.accept import (
    Accepted,
    accept_drawn,
    accept_forced,
    accept_path,
    accept_sampled,
    accept_typical,
    keep_rows,
)
from clover_jax.decoding.cache_reading import cache_reader
from clover_jax.decoding.copies import add_copies, count_copies
from clover_jax.decoding.emission import append_bonus, cut, sibling_ranks, write_tokens
from clover_jax.decoding.sampling import (
    NO_TOKEN,
    Scores,
    add_bias,
    finite_log_softmax,
    mask_out,
    penalize,
    score,
    warp,
)
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig
from clover_jax.decoding.state import RUNNING, DecodeState, searched
from clover_jax.decoding.tree import (
    SUPPORT,
    ChooseChildren,
    Drafted,
    Grower,
    TokenTree,
    draft_adaptive,
    draft_static,
    guessed_scores,
    node_depth,
    sample_children,
    top_children,
)
from clover_jax.decoding.tree_config import AdaptiveTree, CopyTree, Tree, TreeConfig
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
from clover_jax.models.cache import Cache, gather_rows, ordered_after, read_with, write_rows
from clover_jax.models.decoder import Decoder, base_choices, base_logits
from clover_jax.models.placement import by_rows, gathered_in_use, over_rows_and_heads
from clover_jax.models.top_k import argmax


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything that is fixed when a step is compiled; equal configs share one program.

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
        why_not = self._why_no_draws()
        if self.sampling.draft_sampling == "sampled" and why_not is not None:
            raise UserError(why_not)

    @property
    def draws_children(self) -> bool:
        """Whether children are drawn from the draft; `auto` draws wherever that is exact."""
        if self.sampling.draft_sampling == "auto" and self.sampling.verify == "lossless":
            return self.head is not None and self._why_no_draws() is None
        return self.sampling.draft_sampling == "sampled"

    def _why_no_draws(self) -> str | None:
        """Return why children cannot be drawn from the draft; None where they can."""
        if isinstance(self.tree, CopyTree):
            return (
                f"tree {self.tree.name!r} has copies, which are not drawn from the draft: use "
                "draft_sampling topk, or a tree without copies"
            )
        # Scores of these heads come from a fixed table of guesses: no distribution to draw from.
        if self.head is not None and self.head.config.kind in TRAINING_FREE:
            return (
                f"{self.head.config.kind} has no distribution to draw children from: use "
                "draft_sampling topk, whose text has the base's distribution too"
            )
        if isinstance(self.tree, AdaptiveTree):
            return (
                f"tree {self.tree.name!r} is chosen by probability, so its children are not drawn: "
                "use draft_sampling topk, or a static tree with sampled"
            )
        if self.tree.has_rank_gaps:
            # The second draw, verified as if it were the first, would change the distribution.
            return (
                f"tree {self.tree.name!r} leaves out some node's earlier siblings; draft_sampling "
                "sampled needs the children 0 .. k - 1 of every node: use topk"
            )
        return None

    @property
    def drafter(self) -> DraftHead:
        """The draft head; for the stages that plain decoding does not have."""
        if self.head is None:
            raise ValueError("plain decoding has no draft head")
        return self.head

    def committed(self, cache: DraftCache) -> DraftCache:
        """Return a cache that attention reads with the kernel of this config."""
        return read_with(cache_reader(self.attention), cache)

    @property
    def features(self) -> tuple[str, ...]:
        """The base activations that the head reads."""
        return self.head.config.features if self.head else ()


def check_tree(head: DraftHead, tree: Tree) -> None:
    """Raise UserError for a tree that the head cannot draft: too deep, or too wide."""
    config = head.config
    if isinstance(tree, CopyTree):
        tree = tree.drafted  # the head does not limit copies

    # `clover4` cuts its depth to the head's, so only its width can be too large.
    depth = tree.levels_within(config.max_depth)
    if config.max_depth is not None and depth > config.max_depth:
        raise UserError(
            f"tree {tree.name!r} is {depth} deep; this {config.kind} head drafts at most "
            f"{config.max_depth} tokens, one for each position it was trained for: use clover4, "
            f"chain:{config.max_depth} or dynamic:NODES:{config.max_depth}, or train more positions"
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
    """The result of one base forward, for every slot of the tree.

    predicted: of the token after each slot: [B, T] the most probable one where the rule reads
        nothing else (`SamplingConfig.needs_choices_only`), [B, T, V] logits for the other rules.
    fresh: keys and values of the slots.
    features: [B, T, F] the activations that the head will read.
    """

    predicted: Int[Array, "B T"] | Float[Array, "B T V"]
    fresh: Cache
    features: Float[Array, "B T F"]


class StepRecord(struct.PyTreeNode):
    """What one step did, per row; a row that had finished before emits 0.

    accepted: [B] drafted tokens that the verifier accepted, before EOS or the limit cut them.
    emitted:  [B] tokens added to the text.
    proposed: [B] drafted tokens that were verified.
    ranks:    [B, A - 1] of each accepted token, how many of its siblings come before it; the first
        accepted[b] are valid.
    copied:   [B] accepted tokens that were copied from the text; None for trees without copies.
    scores:   of the emitted tokens; None where they are not requested.
    """

    accepted: Int[Array, " B"]
    emitted: Int[Array, " B"]
    proposed: Int[Array, " B"]
    ranks: Int[Array, "B d"]
    copied: Int[Array, " B"] | None = None
    scores: Scores | None = None


def weights_for(
    head: DraftHead | None, base_params: Params, draft_params: Params | None
) -> Weights:
    """Return the weights for the steps of a head, with the lm_head rows of its vocabulary."""
    # Rows are gathered here, once: within the step it would happen at every step.
    if head is not None and head.module.reads_lm_head:
        base_params = with_draft_rows(base_params, head.config)
    return Weights(base_params, draft_params if draft_params is not None else {})


def speculate_and_verify(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Advance every running row by its accepted path and one bonus token."""
    # The head first reads the tokens that the last step accepted; plain decoding has no head.
    state, drafted = draft(config, weights, state)
    # One base forward judges the whole tree; its keys and values stay outside the cache.
    with jax.named_scope("verify"):
        verified = verify_tree(config, weights, state, drafted.tree)
    return accept_and_commit(config, weights, state, drafted, verified)


def draft(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    root: Int[Array, " B"] | None = None,
) -> tuple[DecodeState, Drafted]:
    """Update the draft cache with the tokens accepted last, and draft a tree.

    root: the token to draft under; None for the one emitted last. Without a head it is the tree.
    """
    root = roots(state) if root is None else root
    if config.head is None:
        return state, Drafted(TokenTree.root_only(root))
    weights = gathered_in_use(weights)
    with jax.named_scope("absorb"):
        head_state, cache = absorb_last_accepted(config, weights, state)
    state = state.replace(draft_cache=cache)
    with jax.named_scope("draft"):
        return state, draft_tree(config, weights, state, root, head_state)


def roots(state: DecodeState) -> Int[Array, " B"]:
    """Return each row's root: the token that was emitted last and is not in the KV cache yet."""
    return jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]


def absorb_last_accepted(
    config: StepConfig, weights: Weights, state: DecodeState
) -> tuple[Any, DraftCache]:
    """Return the head's root state and the draft cache after the positions accepted last."""
    # Attention reads as far as the longest row of the batch: an ended row counts as empty, as in
    # `verify_tree`. So it absorbs at position 0 and overwrites the first positions of its draft
    # cache; `state.extract` restores them when a later prompt reuses the slot's caches.
    start = jnp.where(state.finish == RUNNING, state.length - state.count, 0)
    accepted = AcceptedPositions(
        state.features, state.next_tokens, start, state.count, searched(state, state.length)
    )
    return absorb_positions(config, weights, accepted, state.draft_cache)


def absorb_positions(
    config: StepConfig, weights: Weights, accepted: AcceptedPositions, cache: DraftCache
) -> tuple[Any, DraftCache]:
    """Let the head read accepted positions, of a step or of a prompt."""
    frozen, committed = frozen_from_base(weights.base), config.committed(cache)
    head_state, cache = config.drafter.apply(weights.draft, "absorb", frozen, accepted, committed)
    return head_state, read_with(None, cache)


def draft_tree(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    root: Int[Array, " B"],
    head_state: Any,
) -> Drafted:
    """Grow the tree from the head's state at the root; `state` has its draft cache updated."""
    head, frozen = config.drafter, frozen_from_base(weights.base)
    grower = Grower(head, weights.draft, frozen, config.committed(state.draft_cache))
    # The tree that the head drafts itself, with the log of each node's probability of acceptance.
    own = config.tree.candidates if isinstance(config.tree, CopyTree) else config.tree
    if isinstance(own, AdaptiveTree):
        drafted, node_scores = draft_adaptive(grower, root, head_state, own)
    else:
        choose: ChooseChildren = top_children
        if config.draws_children:
            # q has room for at least the children that the tree wants.
            support = min(max(SUPPORT, own.num_ranks), head.config.draft_vocab_size)
            # The root stands at `length`, the nodes of level d = 1, 2, .. at length + d.
            positions = state.length[:, None] + 1 + jnp.arange(own.depth)
            choose = sample_children(state.sampling, positions, config.sampling.truncate, support)
        drafted = draft_static(grower, root, head_state, own, choose)
        node_scores = guessed_scores(own)
    if state.copies is None:  # as in every state of a tree without copies
        return drafted

    return add_copies(
        drafted.tree,
        jnp.broadcast_to(node_scores, drafted.tree.tokens.shape),
        searched(state, state.length),
        state.length,
        state.copies,
        nodes=config.tree.num_nodes,
        depth=config.tree.depth,
        keep_drafted=isinstance(own, TreeConfig),
    )


def verify_tree(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree
) -> Verified:
    """Run the base over every slot of the tree; each slot sees the text and its ancestors."""
    weights = gathered_in_use(weights)
    # Attention reads as far as the longest row of the batch: an ended row counts as empty.
    length = jnp.where(state.finish == RUNNING, state.length, 0)
    # A slot's position is length + its level. Siblings share a position: the mask alone keeps
    # branches apart.
    mask = tree.mask()
    positions = length[:, None] + node_depth(mask)
    output: Any = Decoder(config.base).apply(
        {"params": weights.base},
        tree.tokens,
        positions,
        mask,
        config.committed(state.cache),
        length,
    )
    # Without the barrier XLA keeps each layer's whole product with qkv until the commit.
    hold = jax.lax.optimization_barrier
    fresh = jax.lax.platform_dependent(output.fresh, cpu=lambda x: x, default=hold)

    features = tree_features(config, output.hidden)
    if config.sampling.needs_choices_only:
        # Only choices leave this stage, so that a device need not store the logits.
        return Verified(base_choices(weights.base, output.hidden["post_norm"]), fresh, features)
    logits = base_logits(config.base, weights.base, output.hidden["post_norm"])
    return Verified(logits, fresh, features)


def tree_features(config: StepConfig, hidden: dict[str, Array]) -> Array:
    """Return the base's activations that the head reads: [B, T, F], F = 0 without a head."""
    if not config.features:
        # No head, or one that reads no features: the state keeps the leaf, with width 0.
        return hidden["post_norm"][..., :0]
    return by_rows(select_features(hidden, config.features))


def accept(
    config: StepConfig,
    state: DecodeState,
    drafted: Drafted,
    verified: Verified,
    allowed: Int[Array, "B T w"] | None = None,
) -> Accepted:
    """Apply the verification rule that the config names."""
    sampling, tree, predicted = config.sampling, drafted.tree, verified.predicted
    # Rules that read the most probable tokens alone.
    if sampling.force_accept is not None:
        return accept_forced(tree, predicted, sampling.force_accept)
    if sampling.needs_choices_only:
        return accept_path(tree, predicted)

    # All further rules read logits, with the rows' biases and penalties. A slot's logits predict
    # the token at the next position.
    logits = predicted
    if sampling.biased:
        positions = state.length[:, None] + 1 + tree.level()
        logits = add_bias(logits, state.sampling, state.eos, positions)
    if sampling.penalized:
        # The root is part of the text already.
        is_drafted = (tree.tokens != PAD_TOKEN) & (tree.parent >= 0)
        on_path = tree.mask() & is_drafted[:, None]
        paths = jnp.where(on_path, tree.tokens[:, None], NO_TOKEN)
        logits = penalize(logits, state.sampling, state.tokens, state.end, paths)
    if allowed is not None:
        logits = mask_out(logits, allowed)
    if sampling.verify == "greedy":
        return accept_path(tree, argmax(logits))
    # Typical acceptance judges drafted tokens; plain decoding has none and draws as usual.
    if sampling.verify == "typical" and config.head is not None:
        log_probability = finite_log_softmax(warp(logits, state.sampling, sampling.truncate))
        return accept_typical(
            tree, log_probability, sampling.typical_epsilon, sampling.typical_delta
        )

    # Lossless: sampled children are verified with their q, all others by one draw a node.
    rows, truncate, length = state.sampling, sampling.truncate, state.length
    if drafted.drafts is not None and isinstance(config.tree, TreeConfig):
        return accept_sampled(config.tree, tree, drafted.drafts, logits, rows, length, truncate)
    return accept_drawn(tree, logits, rows, length, truncate)


def observe_verified(
    config: StepConfig, weights: Weights, state: DecodeState, tree: TokenTree, verified: Verified
) -> DecodeState:
    """Show the base's choices after the slots of running rows to a head that has `observe`."""
    if config.head is None or not config.head.module.observes:
        return state
    choices = verified.predicted
    if not config.sampling.needs_choices_only:
        choices = argmax(choices)
    # An ended row is verified with the others, but its tokens are not part of a text.
    valid = (tree.tokens != PAD_TOKEN) & (state.finish == RUNNING)[:, None]
    cache = config.head.apply(
        weights.draft, "observe", state.draft_cache, tree.tokens, choices, valid
    )
    return state.replace(draft_cache=cache)


def accept_and_commit(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    drafted: Drafted,
    verified: Verified,
    allowed: Int[Array, "B T w"] | None = None,
) -> tuple[DecodeState, StepRecord]:
    """Append the accepted path and the bonus token of a verified tree.

    allowed: the tokens that may follow each slot, as in `sampling.mask_out`; None for all.
    """
    with jax.named_scope("accept"):
        accepted = accept(config, state, drafted, verified, allowed)

    # The head may observe every slot; only the accepted path enters the KV cache.
    with jax.named_scope("commit"):
        state = observe_verified(config, weights, state, drafted.tree, verified)
        slots = drafted.tree, accepted, verified.fresh, verified.features
        state, record = commit(state, *slots, by_kernel=config.attention == "pallas")
        if config.sampling.scored:
            # The tokens after the path's slots are the accepted ones and the bonus.
            on_path = jnp.take_along_axis(verified.predicted, accepted.path[..., None], axis=1)
            record = record.replace(scores=score(on_path, state.next_tokens, state.sampling))
        if drafted.copy is not None and state.copies is not None:
            # The best copy is counted in every step, whether it got slots or not.
            counted = count_copies(state.copies, drafted.copy, state.next_tokens, state.count)
            state = state.replace(copies=counted)
        return state, record


def commit(
    state: DecodeState,
    tree: TokenTree,
    accepted: Accepted,
    fresh: Cache,
    features: Float[Array, "B T F"],
    by_kernel: bool = False,
) -> tuple[DecodeState, StepRecord]:
    """Append each running row's accepted path and bonus token; finished rows keep their text.

    fresh: keys and values of the tree's slots, or a delta net's rows. features: what the head will
        read of the slots.
    by_kernel: as `write_rows` has it.
    Committed positions follow the emitted tokens: length = end - 1 always, so at most
    limit - 1 + A positions of the buffers are ever written.
    """
    # All rows run the same code; an ended row emits 0 tokens.
    running = state.finish == RUNNING
    path_tokens = jnp.take_along_axis(tree.tokens, accepted.path, axis=1)
    # Slot 0 of a path is the root, which the text has already.
    candidates = append_bonus(path_tokens[:, 1:], accepted.count, accepted.bonus)
    emission = cut(candidates, accepted.count + 1, state.limit - state.end, state.eos)
    emitted = jnp.where(running, emission.count, 0)
    # The write must wait for the read. In plain decoding the path is constant, the bonus is not.
    write_at = ordered_after(state.length, accepted.bonus)
    write = functools.partial(write_rows, by_kernel=by_kernel)
    rows = gather_rows(fresh, accepted.path)

    new = state.replace(
        # Beyond the emitted tokens this leaves garbage, which later steps overwrite.
        tokens=write_tokens(state.tokens, candidates, state.length + 1),
        length=state.length + emitted,
        end=state.end + emitted,
        finish=jnp.where(running, emission.finish, state.finish),
        # A row that has ended emits nothing, so a delta net's state stays.
        cache=over_rows_and_heads(write, state.cache, rows, write_at, emitted),
        features=jnp.take_along_axis(features, accepted.path[..., None], axis=1).astype(
            state.features.dtype
        ),
        # The head absorbs these positions at the start of the next step, `count` of them.
        next_tokens=candidates,
        count=emitted,
    )
    new = new.replace(tokens=keep_rows(running, new.tokens, state.tokens))
    copied = None
    if tree.copied is not None:
        # Beyond the accepted path lies slot 0, the root, which is not a copy.
        on_path = jnp.take_along_axis(tree.copied, accepted.path, axis=1)
        copied = jnp.where(running, on_path.sum(axis=-1), 0)
    return new, StepRecord(
        accepted=jnp.where(running, accepted.count, 0),
        emitted=emitted,
        proposed=jnp.where(running, (tree.tokens[:, 1:] != PAD_TOKEN).sum(axis=-1), 0),
        ranks=sibling_ranks(tree.parent, accepted.path[:, 1:]),
        copied=copied,
    )
