"""The accept stage: which path of the verified tree becomes text, and the token after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, typed
from clover_jax.decoding.tree import TokenTree, node_depth
from clover_jax.sharding.top_k import argmax


class Accepted(struct.PyTreeNode):
    """The accepted path of each row.

    path:  [B, A] slots from the root down; the first count + 1 are valid, the others are 0.
    count: [B] accepted drafted tokens.
    bonus: [B] the base's own token after the last accepted node.
    """

    path: Int[Array, "B A"]
    count: Int[Array, " B"]
    bonus: Int[Array, " B"]


@typed
def accept_path(tree: TokenTree, following: Int[Array, "B T"]) -> Accepted:
    """Accept the longest root path whose every token is the base's own choice at its parent.

    following: the token that the base puts after every slot, its argmax.
    Siblings carry different tokens, so at most one path qualifies.

    Example: tokens [[5, 7, 8, 9]], parent [[-1, 0, 1, 0]] and following [[7, 8, 4, 0]] accept slots
    0, 1, 2 with bonus 4.
    """
    # Scores only break ties between paths of one length, and here no ties occur.
    passes = _is_chosen(tree, following)
    return _longest(tree, passes, jnp.zeros(tree.tokens.shape), following)


def accept_typical(
    tree: TokenTree,
    log_probability: Float[Array, "B T V"],
    epsilon: float,
    delta: float,
) -> Accepted:
    """Accept the longest path of typical tokens. NOT lossless: the text's distribution changes.

    Medusa's rule: a node passes when p(x) > min(epsilon, delta exp(-H)) at its parent, with
    H = -sum p log(p + 1e-5), and all its ancestors pass; ties between paths of one length go to the
    most probable; the next token is the base's argmax.

    log_probability: log p of the base at its sampling temperature, at every slot.
    """
    # The more certain the base is, the more probable a token must be.
    p = jnp.exp(log_probability)
    entropy = -jnp.sum(p * jnp.log(p + 1e-5), axis=-1)
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))

    # A node is judged at its parent, which predicts it.
    parent = jnp.maximum(tree.parent, 0)
    row = jnp.arange(tree.tokens.shape[0])[:, None]
    own = log_probability[row, parent, jnp.maximum(tree.tokens, 0)]
    passes = jnp.exp(own) > threshold[row, parent]
    # An unused slot holds PAD_TOKEN, for which token 0 was looked up above.
    passes &= tree.tokens >= 0
    return _longest(tree, passes, own, argmax(log_probability))


@typed
def accept_forced(tree: TokenTree, following: Int[Array, "B T"], count: int) -> Accepted:
    """Accept exactly `count` drafted tokens, for timing: the text means nothing.

    following: as for `accept_path`. Of the paths of that length it takes one with the most of the
    base's own choices, so that the choices decide what is committed, as in real decoding. Of a
    shallower tree the deepest path is accepted.
    """
    # Any token passes down to level `count`; unused slots hold PAD_TOKEN and stay out.
    passes = (tree.level() <= count) & (tree.tokens >= 0)
    score = _is_chosen(tree, following).astype(jnp.float32)
    return _longest(tree, passes, score, following)


def _is_chosen(tree: TokenTree, following: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return whether each slot's token is the base's choice after its parent."""
    # PAD_TOKEN equals no choice. The root's result is not used: `_longest` always keeps the root.
    return tree.tokens == jnp.take_along_axis(following, jnp.maximum(tree.parent, 0), axis=1)


def _longest(
    tree: TokenTree,
    passes: Bool[Array, "B T"],
    score: Float[Array, "B T"],
    following: Int[Array, "B T"],
) -> Accepted:
    """Accept the longest path of passing slots, the largest sum of scores among equals."""
    # A slot is kept if it and all its ancestors pass.
    mask = tree.mask()
    is_root = tree.parent < 0
    kept = jnp.all((passes | is_root)[:, None, :] | ~mask, axis=-1)

    # The longest kept path of each row, by the score where several are as long.
    level = node_depth(mask)
    count = jnp.where(kept, level, 0).max(axis=-1)
    candidates = kept & (level == count[:, None])
    # The root belongs to every path and was emitted before: its score does not count.
    total = jnp.sum(jnp.where(mask & ~is_root[:, None, :], score[:, None, :], 0.0), axis=-1)
    end = jnp.argmax(jnp.where(candidates, total, -jnp.inf), axis=-1)[:, None]

    # Its slots from the root down: the ancestor at each depth.
    on_path = jnp.take_along_axis(mask, end[..., None], axis=1)  # [B, 1, T]
    # Beyond the end no slot has the depth, and argmax gives 0, the root: `commit` relies on it.
    at_depth = on_path & (level[:, None, :] == jnp.arange(tree.depth + 1)[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    return Accepted(path, count, jnp.take_along_axis(following, end, axis=1)[:, 0])


def finite_log_softmax(warped: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """Return log probabilities of warped logits, finite where a token was dropped."""
    return jnp.maximum(jax.nn.log_softmax(warped, axis=-1), -1e30)
