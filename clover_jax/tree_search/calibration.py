"""The acceptance rate of a head by rank: the ranks that it gives to the base's own tokens.

The base decodes prompts plainly. Then, at each position of that text, the head absorbs what came
before and proposes level by level, teacher-forced with the true tokens. The rank of each true token
is the one that a tree needs to accept it. This uses the contract of drafters only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Int
from clover_jax.config import DrafterConfig
from clover_jax.decoding.accept import Accepted
from clover_jax.decoding.prefill import prefill_chunk
from clover_jax.decoding.programs import Placement, repeated
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.decoding.state import DecodeState, bucket, empty_state
from clover_jax.decoding.step import StepConfig, Weights, absorb_pending, commit, verify_tree
from clover_jax.decoding.tree import TokenTree
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.drafter import FewTokens, Proposal, frozen_from_base
from clover_jax.drafters.tokens import to_draft
from clover_jax.loading.models import Models
from clover_jax.sharding.placement import gathered_in_use

PREFILL = 64
BATCH_SIZE = 4
MOST_RANKS = 16
MISSED = -1  # rank of a token that no tree would hold
_LACKS = 1 << 30  # more ranks than any vocabulary has


def measure_ranks(
    models: Models,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    depth: int,
    warping: SamplingParams,
) -> np.ndarray:
    """Return [samples, depth] ranks of the base's next tokens; MISSED from MOST_RANKS on.

    depth: levels to look at, within what the head can draft.
    warping: how the base's own text is drawn; greedily at temperature 0.
    """
    # Top-k and top-p cost a sort, and change nothing where nothing is drawn.
    is_drawn = warping.temperature > 0
    truncate = is_drawn and (warping.top_k > 0 or warping.top_p < 1)
    sampling = SamplingConfig(verify="lossless" if is_drawn else "greedy", truncate=truncate)
    engine = models.plain().engine(BATCH_SIZE, sampling)
    used = warping.to_dict() if is_drawn else {}
    requests = [Request(index, prompt, new_tokens, **used) for index, prompt in enumerate(prompts)]

    # The base's own text: ranks are counted along it.
    texts: list[list[int]] = []
    for progress in engine.stream(models.base.params, None, requests):
        # A row that the base's context cut short is left out.
        if progress.done and len(progress.row.output_ids) == new_tokens:
            texts.append([*progress.row.prompt_ids, *progress.row.output_ids])

    # The same positions again, now with the head beside the base.
    with Placement(models.mesh).in_use():
        walks = [
            _walk(models, texts[i : i + BATCH_SIZE], new_tokens, depth)
            for i in range(0, len(texts), BATCH_SIZE)
        ]
    ranks = np.concatenate(walks) if walks else np.zeros((0, depth), int)
    return np.where(ranks < MOST_RANKS, ranks, MISSED)


def _walk(
    models: Models, texts: Sequence[Sequence[int]], new_tokens: int, depth: int
) -> np.ndarray:
    """Return the ranks at every position whose next `depth` tokens are in the text."""
    starts = [len(text) - new_tokens for text in texts]
    size = bucket(max(map(len, texts)) + depth + PREFILL)
    tokens = np.zeros((len(texts), size), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text

    # The state needs no room for a tree: each step commits one true token.
    config = StepConfig(models.base.config, models.head, parse_tree(f"chain:{depth}"))
    shallow = TreeConfig.root_only()
    state = empty_state(
        models.base.config, models.head, shallow, len(texts), size, 1, models.dtype
    ).replace(
        tokens=jnp.asarray(tokens),
        end=jnp.asarray(starts, jnp.int32),
        limit=jnp.full((len(texts),), size, jnp.int32),
    )
    prefill = jax.jit(functools.partial(prefill_chunk, config, PREFILL), donate_argnums=1)
    for start in range(0, max(starts), PREFILL):
        state, _ = prefill(models.weights, state, np.int32(start))

    num_samples = max(new_tokens - 1 - depth, 0)
    given = jnp.asarray(tokens)
    # Prefill ended with the base's own choice, which a sampled text need not have taken.
    root = jnp.take_along_axis(given, state.length[:, None], axis=1)
    next_tokens = jnp.broadcast_to(root, state.next_tokens.shape)
    state = state.replace(tokens=jnp.copy(given), next_tokens=next_tokens)

    # One program over all positions: a call for each would cost more than its work.
    ranks = jnp.zeros((num_samples, len(texts), depth), jnp.int32)
    walk = repeated(functools.partial(_probe, config))
    _, ranks = walk((models.weights, given), (state, ranks), num_samples)
    return np.asarray(ranks).reshape(-1, depth)


def _probe(
    config: StepConfig,
    given: tuple[Weights, Int[Array, "B S"]],
    carry: tuple[DecodeState, Int[Array, "n B d"]],
    number: Int[Array, ""],
) -> tuple[DecodeState, Int[Array, "n B d"]]:
    """Go one token forward along the text; add the ranks of the tokens after it."""
    (weights, text), (state, ranks) = given, carry
    weights = gathered_in_use(weights)
    head_state, cache = absorb_pending(config, weights, state)
    state = state.replace(draft_cache=cache)
    following = state.length[:, None] + jnp.arange(config.tree.depth + 1)
    here = jnp.take_along_axis(text, following, axis=1)  # the root, and what comes after it
    ranks = ranks.at[number].set(_ranks(config, weights, head_state, state, here[:, 1:]))

    # Teacher forcing: advance by the true token.
    tree = TokenTree.root_only(here[:, 0])
    verified = verify_tree(config, weights, state, tree)
    only = jnp.zeros_like(state.length)
    accepted = Accepted(path=only[:, None], count=only, bonus=here[:, 1])
    state, _ = commit(state, tree, accepted, verified.fresh, verified.features)
    return state, ranks


def _ranks(
    config: StepConfig,
    weights: Weights,
    branch: object,
    state: DecodeState,
    true: Int[Array, "B d"],
) -> Int[Array, "B d"]:
    assert config.head is not None  # ranks are a head's
    head, frozen = config.head, frozen_from_base(weights.base)
    ranks = []
    for depth in range(true.shape[1]):
        proposal = head.apply(weights.draft, "propose", frozen, branch, depth)
        ranks.append(_rank_of(head.config, proposal, true[:, depth]))
        # Fed the true token: an ideal tree would hold it.
        if depth + 1 < true.shape[1]:
            parent = jnp.zeros_like(true[:, :1])
            token = true[:, depth : depth + 1]
            arguments = (frozen, branch, state.draft_cache, parent, token, depth + 1)
            branch = head.apply(weights.draft, "advance", *arguments)
    return jnp.stack(ranks, axis=1)


def _rank_of(
    config: DrafterConfig, proposal: Proposal, token: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Return how many tokens the head puts before this one; _LACKS where it has no such token.

    proposal: of a single branch.
    """
    if isinstance(proposal, FewTokens):
        matches = proposal.ids[:, 0] == token[:, None]
        return jnp.where(matches.any(axis=1), matches.argmax(axis=1), _LACKS)
    index, logits = to_draft(config, token), proposal[:, 0]
    own = jnp.take_along_axis(logits, jnp.maximum(index, 0)[:, None], axis=1)
    return jnp.where(index >= 0, (logits > own).sum(axis=1), _LACKS)
