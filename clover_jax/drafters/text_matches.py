"""Where a text has been before: the longest matches of its last tokens, and what followed them.

Every position is compared at once, so no suffix automaton is needed in a compiled step: for all j

    m_j = sum_{l < 8} prod_{l' <= l} [x_{j-1-l'} = y_{l'}]      y_0, y_1 .. the last tokens

is the length of the match after which x_j came. Only the text is read, 4 bytes a position.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Int
from clover_jax.drafters.drafter import PAD_TOKEN

MOST_MATCHED = 8  # tokens that are compared; a longer match counts as this one


class Matches(struct.PyTreeNode):
    """The best k matches of each of W suffixes: the longest first, the newest among equals.

    What followed them differs. Where there are fewer than k, length is 0 and token PAD_TOKEN.

    token:  [B, W, k] what followed the match.
    place:  [B, W, k] where that token lies in the text.
    length: [B, W, k] tokens that match, MOST_MATCHED at most.
    """

    token: Int[Array, "B W k"]
    place: Int[Array, "B W k"]
    length: Int[Array, "B W k"]


def last_tokens(text: Int[Array, "B S"], end: Int[Array, " B *w"]) -> Int[Array, " B *w l"]:
    """Return the last MOST_MATCHED tokens up to `end`, newest first; PAD_TOKEN before the text."""
    index = end[..., None] - jnp.arange(MOST_MATCHED)
    inside = jnp.clip(index, 0, text.shape[1] - 1)
    tokens = jnp.take_along_axis(text, inside.reshape(len(text), -1), axis=1)
    return jnp.where(index < 0, PAD_TOKEN, tokens.reshape(index.shape))


def known_text(
    tokens: Int[Array, "B n"], end: Int[Array, " B"], source: Int[Array, "B r"] | None
) -> Int[Array, "B S"]:
    """Return what may be searched: a row's tokens up to `end`, PAD_TOKEN, and what it brought.

    source: other text to copy from, begun by a PAD_TOKEN; None where there is none.
    """
    # Up to the root, itself included; beyond it lies garbage of rejected drafts.
    known = jnp.where(jnp.arange(tokens.shape[1]) <= end[:, None], tokens, PAD_TOKEN)
    return known if source is None else jnp.concatenate([known, source], axis=1)


def match_lengths(text: Int[Array, "B S"], suffix: Int[Array, "B W l"]) -> Int[Array, "B W S"]:
    """Return the length of each suffix's match that ends right before each position."""
    size = text.shape[1]
    matched = jnp.ones((*suffix.shape[:2], size), bool)
    length = jnp.zeros(matched.shape, jnp.int32)
    for back in range(suffix.shape[2]):
        # Column j has the token `back + 1` places before j, for all j at once.
        earlier = jnp.pad(text, ((0, 0), (back + 1, 0)), constant_values=PAD_TOKEN)[:, :size]
        wanted = suffix[..., back, None]
        matched &= (earlier[:, None] == wanted) & (wanted != PAD_TOKEN)
        length += matched
    return length


def find_matches(
    text: Int[Array, "B S"], end: Int[Array, " B"], suffix: Int[Array, "B W l"], count: int
) -> Matches:
    """Return the best matches of every suffix, `count` of them, each followed by another token.

    text: PAD_TOKEN where there is none. end: where the row's own text ends; of what lies beyond
        the oldest match goes first, which leaves most to copy.
    suffix: the last tokens of W branches of the text, newest first.

    Example: after "a b c a b d a b" the best is d, then c, both with a match of 2.
    """
    length = match_lengths(text, suffix)

    # One number orders them by length, then by age.
    size = text.shape[1]
    place = jnp.arange(size)
    age = jnp.where(place <= end[:, None], place, 2 * size - place)[:, None]
    # Where nothing follows a match there is nothing to copy.
    followed = (length > 0) & (text != PAD_TOKEN)[:, None]
    order = jnp.where(followed, length * 2 * size + age, -1)

    # Take the best, and leave out all that say the same.
    places, lengths, tokens = [], [], []
    for _ in range(count):
        best = order.max(axis=-1)
        found = jnp.maximum(best, 0)
        age = found % (2 * size)
        places.append(jnp.where(age < size, age, 2 * size - age))
        lengths.append(found // (2 * size))
        followed_by = jnp.take_along_axis(text, places[-1], axis=1)
        tokens.append(jnp.where(best < 0, PAD_TOKEN, followed_by))
        order = jnp.where(text[:, None] == tokens[-1][..., None], -1, order)
    return Matches(*(jnp.stack(x, axis=-1) for x in (tokens, places, lengths)))
