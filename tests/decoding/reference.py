"""A slow and obviously right reference for the fast path. No KV cache, no batch, no fused step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.drafters.drafter import (
    PAD_TOKEN,
    AcceptedPositions,
    FewTokens,
    frozen_from_base,
    select_features,
    with_draft_rows,
)
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.models.decoder import Decoder, DecoderOutput, base_logits, causal_mask

PADDING = 64
_NONE = (PAD_TOKEN,) * 64  # proposals beyond the few tokens of a head


def plain_greedy(
    config: BaseConfig, params: Params, prompt: Sequence[int], max_new_tokens: int
) -> list[int]:
    """Emit the argmax of a full forward over the whole text, one token after another."""
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(int(np.argmax(_logits(config, params, text)[len(text) - 1])))
    return text[len(prompt) :]


def draft_tokens(
    head: DraftHead,
    draft_params: Params,
    config: BaseConfig,
    params: Params,
    text: Sequence[int],
    tree: TreeConfig,
) -> dict[tuple[int, ...], int]:
    """Return the token of every node of a static tree, by its path of child ranks.

    text: all tokens so far; the last one is the tree's root. The head reads the whole text again
    and then follows one path after another, one branch at a time.
    """
    *context, root = text
    padded = _pad(context)
    features = select_features(_forward(config, params, context).hidden, head.config.features)
    next_tokens = jnp.asarray(_pad([*context[1:], root]))
    # One row: `zero` is the position where it starts and, below, the number of its only branch.
    zero, config_of_head = jnp.zeros(1, jnp.int32), head.config
    frozen = frozen_from_base(with_draft_rows(params, config_of_head))
    to_target = config_of_head.draft_to_target or range(config_of_head.vocab_size)

    def apply(method: str, *arguments: Any, static: tuple = ()) -> Any:
        return _head_method(head, method, static)(draft_params, *arguments)

    # Read the whole text at once, as if nothing had been committed before.
    cache = head.module.init_cache(1, padded.shape[1], features.dtype)
    count = jnp.asarray([len(context)])
    known = jnp.asarray(_pad(text))
    known = jnp.where(jnp.arange(known.shape[1]) < len(text), known, PAD_TOKEN)
    accepted = AcceptedPositions(features, next_tokens, zero, count, known)
    start, cache = apply("absorb", frozen, accepted, cache)
    states: dict[tuple[int, ...], Any] = {(): start}
    tokens: dict[tuple[int, ...], int] = {}

    # Parents come before children, so each path continues from its parent's state.
    for path in tree.paths:
        depth, above = len(path) - 1, states[path[:-1]]
        proposal = apply("propose", frozen, above, static=(depth,))
        if isinstance(proposal, FewTokens):
            tokens[path] = [*np.asarray(proposal.ids)[0, 0].tolist(), *_NONE][path[-1]]
        else:
            # Stable sort: the lower id first among equal logits, as in lax.top_k.
            order = np.argsort(-np.asarray(proposal)[0, 0], kind="stable")
            tokens[path] = to_target[int(order[path[-1]])]
        token = jnp.asarray([[tokens[path]]])
        # A single branch: its parent is number 0 of the level above.
        arguments = (frozen, above, cache, zero[None], token)
        states[path] = apply("advance", *arguments, static=(depth + 1,))
    return tokens


@functools.cache
def _head_method(head: DraftHead, method: str, static: tuple) -> Callable:
    """Return a method of the head, compiled; `static` are its last arguments."""

    def call(draft_params: Params, *arguments: Any) -> Any:
        return head.module.apply({"params": draft_params}, *arguments, *static, method=method)

    return jax.jit(call)


def speculative_greedy(
    head: DraftHead,
    draft_params: Params,
    config: BaseConfig,
    params: Params,
    prompt: Sequence[int],
    max_new_tokens: int,
    tree: TreeConfig,
) -> tuple[list[int], list[int]]:
    """Decode by drafting and verifying; return the emitted tokens and the accepted counts."""
    text, accepted = list(prompt), []
    text.append(int(np.argmax(_logits(config, params, text)[-1])))
    while len(text) < len(prompt) + max_new_tokens:
        tokens = draft_tokens(head, draft_params, config, params, text, tree)
        path: tuple[int, ...] = ()
        # Verify by full forwards, one token at a time: no tree mask, no cache.
        while True:
            best = int(np.argmax(_logits(config, params, text)[-1]))
            children = [p for p in tree.paths if p[:-1] == path and tokens[p] == best]
            text.append(best)
            # The base wants a token that no child holds: that is the bonus.
            if not children:
                break
            path = children[0]
        accepted.append(len(path))
    return text[len(prompt) :][:max_new_tokens], accepted


def _logits(config: BaseConfig, params: Params, text: Sequence[int]) -> np.ndarray:
    output = _forward(config, params, text)
    logits = base_logits(config, params, output.hidden["post_norm"])
    return np.asarray(logits)[0, : len(text)]


def _forward(config: BaseConfig, params: Params, text: Sequence[int]) -> DecoderOutput:
    return _full_forward(config)(params, _pad(text))


@functools.cache
def _full_forward(config: BaseConfig) -> Callable[..., DecoderOutput]:
    def forward(params: Params, tokens: Array) -> DecoderOutput:
        positions = jnp.arange(tokens.shape[1])[None]
        mask = causal_mask(*tokens.shape)
        output: Any = Decoder(config).apply({"params": params}, tokens, positions, mask)
        return output

    return jax.jit(forward)


def _pad(tokens: Sequence[int]) -> np.ndarray:
    """Pad to [1, a multiple of PADDING], so that few lengths are compiled.

    A longer text is padded as a head's cache must be, which is read by chunks.
    """
    unit = PADDING if len(tokens) <= CACHE_CHUNK else CACHE_CHUNK
    padded = np.zeros((1, -(-len(tokens) // unit) * unit), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded
