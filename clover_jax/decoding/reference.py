"""Slow and obviously right: the judge of the fast path. No cache, no batch, no compiled step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.tree import TreeConfig
from clover_jax.drafters.drafter import frozen_from_base, select_features
from clover_jax.drafters.registry import DraftHead
from clover_jax.models.decoder import Decoder, DecoderOutput, causal_mask, project

PADDING = 64  # lengths are padded to a multiple, only to keep the number of compilations small


def plain_greedy(
    config: BaseConfig,
    params: Params,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
) -> list[int]:
    """Emit the argmax of a full forward over the whole text, one token after another."""
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(int(np.argmax(_logits(config, params, text)[len(text) - 1])))
        if text[-1] in eos_ids:
            break
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

    text: all tokens so far; the last one is the tree's root. Each node is drafted from scratch:
    the head reads the whole text through its training forward and then follows one path.
    """
    *context, root = text
    output = _forward(config, params, context)
    features = select_features(output.hidden, head.config.features)[:, : len(context)]
    frozen = frozen_from_base(params)

    def apply(method: str, *arguments):
        return head.module.apply({"params": draft_params}, *arguments, method=method)

    next_tokens = jnp.asarray([[*context[1:], root]])
    zero, count = jnp.zeros(1, jnp.int32), jnp.asarray([len(context)])
    cache = apply("init_cache", 1, len(context), features.dtype)
    start, cache = apply("absorb", frozen, features, next_tokens, zero, count, cache)
    states, tokens = {(): start}, {}
    for path in tree.paths:
        depth, above = len(path) - 1, states[path[:-1]]
        logits = np.asarray(apply("propose", frozen, above, depth))[0, 0]
        # Stable sort: the lower id first among equal logits, as in lax.top_k.
        tokens[path] = int(np.argsort(-logits, kind="stable")[path[-1]])
        token = jnp.asarray([[tokens[path]]])
        states[path] = apply("advance", frozen, above, cache, zero[None], token, depth + 1)
    return tokens


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
        while True:
            best = int(np.argmax(_logits(config, params, text)[-1]))
            children = [p for p in tree.paths if p[:-1] == path and tokens[p] == best]
            text.append(best)
            if not children:
                break
            path = children[0]
        accepted.append(len(path))
    return text[len(prompt) :][:max_new_tokens], accepted


def _logits(config: BaseConfig, params: Params, text: Sequence[int]) -> np.ndarray:
    output = _forward(config, params, text)
    logits = project(frozen_from_base(params).lm_head, output.hidden["post_norm"])
    return np.asarray(logits)[0, : len(text)]


def _forward(config: BaseConfig, params: Params, text: Sequence[int]) -> DecoderOutput:
    size = -(-len(text) // PADDING) * PADDING
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(text)] = text
    return _padded_forward(config, params, padded)


def _padded_forward(config: BaseConfig, params: Params, tokens: np.ndarray) -> DecoderOutput:
    positions = np.arange(tokens.shape[1])[None]
    apply = jax.jit(Decoder(config).apply)
    return apply({"params": params}, tokens, positions, causal_mask(*tokens.shape))
