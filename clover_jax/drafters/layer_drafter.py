"""Heads of EAGLE's kind: one decoder layer that reads its own output.

The layer reads the embedding of x_{t+1} and a state at t. For committed positions that state
comes from the base; below the root of a tree it is the layer's own output at the parent. Every
branch carries the keys and values of its own path, so that a level is attended to without a mask
over the tree, and a branch moves to another place of the beam as a whole.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.config import LayerConfig
from clover_jax.drafters.augmenting import run_trunk
from clover_jax.drafters.drafter import AcceptedPositions, Drafter, Frozen, Ids
from clover_jax.drafters.tokens import embed_input, shift_left
from clover_jax.models.attention import RunningSoftmax, attend_cache, attend_rows, finish
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache, KeyValue, init_cache
from clover_jax.models.decoder import Attend, attend, packed_mask
from clover_jax.models.score_rules import ScoreRules, scaled


class Path(struct.PyTreeNode):
    """Keys and values that one branch alone sees: the j drafted tokens that led to it.

    key, value: [B, W, j, K, H]
    """

    key: Float[Array, "B W j K H"]
    value: Float[Array, "B W j K H"]

    def extended(self, fresh: KeyValue) -> Path:
        """Return the paths with the branches' own rows, [B, K, W, H], at their end."""
        # One more token on each path: [B, K, W, H] becomes [B, W, 1, K, H].
        rows = jax.tree.map(lambda x: x.transpose(0, 2, 1, 3)[:, :, None], fresh)
        return Path(
            key=jnp.concatenate([self.key, rows.key], axis=2),
            value=jnp.concatenate([self.value, rows.value], axis=2),
        )


class BranchState(struct.PyTreeNode):
    """W branches of a drafted tree.

    hidden: [B, W, D] the layer's output at the branch's last token.
    path:   what the branch attends to in addition to the committed cache.
    length: [B, W] committed positions, the same for all branches of a row.
    """

    hidden: Float[Array, "B W D"]
    path: Path
    length: Int[Array, "B W"]


class Prefix(NamedTuple):
    """The text's own rows, which in training stand where the committed cache does in drafting.

    rows:      [B, K, S, H]
    mask:      [B, S, S] True where a branch sees a row.
    positions: [B, S] of the rows.
    """

    rows: KeyValue
    mask: Bool[Array, "B S S"]
    positions: Int[Array, "B S"]


class Attended(NamedTuple):
    """The arguments of a `DecoderLayer` after its input: positions, and what they attend to."""

    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T T"] | None = None
    cache: KeyValue | None = None
    length: Int[Array, " B"] | None = None
    attend: Attend = attend


class LayerDrafter(Drafter):
    """What these heads share; a subclass says what the layer reads and what it proposes.

    It defines `run(embedded, state, attended)`, the layer; and, where they differ,
    `fuse(features)`, the state of a committed position, and `logits`.
    """

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        return init_cache(self.config.layer, 1, batch, length, dtype)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[BranchState, Cache]:
        """Run the layer over accepted positions, from the base's own states; see the contract."""
        embedded = embed_input(self.config, frozen, accepted.next_tokens)
        states = self.fuse(accepted.features)

        # One layer has one cache and one pair of fresh keys and values.
        def trunk(positions, mask, cache, length):
            attended = Attended(positions, mask, cache[0], length)
            hidden, fresh = self.run(embedded, states, attended)
            return hidden, (fresh,)

        root, cache = run_trunk(trunk, accepted, cache)
        # The root's own keys are in the cache, so its path is empty.
        path = empty_path(self.config.layer, len(root), 1, root.dtype)
        return BranchState(root, path, (accepted.start + accepted.count)[:, None]), cache

    def propose(self, frozen: Frozen, state: BranchState, depth: int) -> Float[Array, "B W Vd"]:
        return self.logits(frozen, state.hidden, depth)

    def advance(
        self, frozen: Frozen, state: BranchState, cache: Cache, parent: Ids, token: Ids, depth: int
    ) -> BranchState:
        """Feed a drafted token and its parent's output to the layer."""
        # Each branch continues from its own parent: state, path and length.
        above = jax.tree.map(
            lambda x: jnp.take_along_axis(
                x, jnp.expand_dims(parent, tuple(range(2, x.ndim))), axis=1
            ),
            state,
        )
        # Fused into what follows, this does not compile for a GPU: with one row and `paper25` JAX
        # 0.10.2's XLA fails with "Reshape input and output shapes must be the same".
        hold = jax.lax.optimization_barrier
        above = jax.lax.platform_dependent(above, cuda=hold, default=lambda x: x)
        attended = Attended(
            # Committed positions end at length - 1; a node of level d lies d further.
            above.length - 1 + depth,
            cache=cache[0],
            length=above.length[:, 0],
            attend=functools.partial(attend_path, path=above.path),
        )
        embedded = embed_input(self.config, frozen, token)
        hidden, fresh = self.run(embedded, above.hidden, attended)
        return BranchState(hidden, above.path.extended(fresh), above.length)

    def on_own_drafts(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch
    ) -> list[Float[Array, "B S D"]]:
        """Return the outputs of `num_positions` steps, the first from the base's states.

        Step j reads e(x_{t+1+j}) and the output of step j-1 at t, at position t+j, and attends to
        step 0's keys up to t and, of each step 1..j, to the key at its own t.
        """
        tokens, positions, mask = batch.tokens, batch.positions, packed_mask(batch.segment_ids)
        # Step 0 reads the base's states.
        embedded = embed_input(self.config, frozen, shift_left(tokens, 1))
        hidden, rows = self.run(embedded, self.fuse(features), Attended(positions, mask))
        outputs, prefix = [hidden], Prefix(rows, mask, positions)
        path = empty_path(self.config.layer, len(tokens), tokens.shape[1], hidden.dtype)

        # Later steps read their own output, and attend along their own path only.
        for step in range(1, self.config.num_positions):
            embedded = embed_input(self.config, frozen, shift_left(tokens, step + 1))
            own = functools.partial(attend_path, path=path, prefix=prefix)
            hidden, fresh = self.run(embedded, hidden, Attended(positions + step, attend=own))
            outputs.append(hidden)
            path = path.extended(fresh)
        return outputs

    def fuse(self, features: Float[Array, "B A F"]) -> Float[Array, "B A D"]:
        """Return the states of committed positions: the features as they are."""
        return features

    def run(
        self, embedded: Float[Array, "B T D"], state: Float[Array, "B T D"], attended: Attended
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Return the layer's output and its fresh keys and values."""
        raise NotImplementedError


def empty_path(config: LayerConfig, batch: int, width: int, dtype: jnp.dtype) -> Path:
    """Return the paths of `width` branches that have no drafted token yet."""
    # Axis j has length 0; each level adds one entry.
    nothing = jnp.zeros((batch, width, 0, config.num_kv_heads, config.head_dim), dtype)
    return Path(key=nothing, value=nothing)


def attend_path(
    query: Float[Array, "B K G T H"],
    fresh: KeyValue,
    _: None,
    cache: KeyValue | None,
    length: Int[Array, " B"] | None,
    rules: ScoreRules | None,
    *,
    path: Path,
    prefix: Prefix | None = None,
) -> Float[Array, "B K G T H"]:
    """Attend from each branch to its own path, itself included, and to what all branches share.

    cache, length: the committed positions, when drafting.
    prefix: the positions of the text, in training.
    """
    # The branch's own tokens, itself included, as one small softmax of its own.
    own = path.extended(fresh)
    products = jnp.einsum("bkgth,btjkh->bkgtj", query, own.key, preferred_element_type=jnp.float32)
    scores = scaled(products, query.shape[-1], rules)
    if rules is not None and rules.slopes is not None:
        # How far back each of the path's tokens lies; the branch's own comes last, at 0.
        back = jnp.arange(own.key.shape[2])[::-1]
        scores -= rules.slopes[:, :, None, None] * back
    peak = scores.max(axis=-1)
    weight = jnp.exp(scores - peak[..., None])
    mixed = jnp.einsum(
        "bkgtj,btjkh->bkgth",
        weight.astype(own.value.dtype),
        own.value,
        preferred_element_type=jnp.float32,
    )
    softmax = RunningSoftmax(peak, weight.sum(axis=-1), mixed)

    # Then what all branches share: the text in training, the KV cache in drafting.
    if prefix is not None:
        mask = prefix.mask[:, None, None]
        softmax = attend_rows(query, prefix.rows, mask, softmax, rules, prefix.positions)
    if cache is not None:
        assert length is not None  # a cache and its lengths come together
        softmax = attend_cache(query, cache, length, softmax, rules)
    return finish(softmax, query.dtype, rules)
