"""One training batch: packed rows of tokens and the facts about each position."""

from __future__ import annotations

from flax import struct

from clover_jax.array_types import Array, Bool, Int


class Batch(struct.PyTreeNode):
    """B packed rows of S positions.

    tokens:      [B, S] token ids; 0 where there is padding.
    segment_ids: [B, S] 1, 2, .. number the documents of a row; 0 is padding.
    positions:   [B, S] position within the document.
    loss_mask:   [B, S] True on the tokens to learn: the assistant's, or all of plain text.
    hidden: name -> [B, S, D] the base's cached activations; None where the base is run for them.
    anchors:     [B, M] places of x_{t+1}, the only t at which a head trains; None for all.
    """

    tokens: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    loss_mask: Bool[Array, "B S"]
    hidden: dict[str, Array] | None = None
    anchors: Int[Array, "B M"] | None = None
