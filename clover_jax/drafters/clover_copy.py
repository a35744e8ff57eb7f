"""Clover-Copy: Clover-LR, whose proposals are mixed with copies of the row's own text.

Sources: pointer networks (Vinyals et al., 2015), pointer-generators (See et al., 2017) and their
sentinel (Merity et al., 2016). That a pointer moves on with the draft, so that deeper levels copy
on without attention of their own, is new. State z_j and the token x_{j+1} after it are followed by
x_{j+2}, as z_t and x_{t+1} by the proposal: a pointer at place p = j+2 of the text says x_p.

    m_p    = tokens of the longest match of .. x_{p-2} x_{p-1} with .. x_t x_{t+1}, 8 at most
    a_p    = <W_q z_t, W_k z_{p-2}> / sqrt(r)
    p_n    = the k places of largest a_p + b^0[m_p], the newest among equals
    o_n^i  = exp(a_n + b^i[m_n^i])                         odds of this copy against the head
    P^i(v) = (softmax(logits^i)(v) + sum_n o_n^i [x_{p_n+i} = v]) / (1 + sum_n o_n^i)
    m^{i+1} = m^i + 1 where x_{p_n+i} was drafted, else 0

The gate of a pointer-generator is here sum_n o_n / (1 + sum_n o_n). Past the end of the text a
pointer goes round, as the loop does that it follows. W_q, W_k [D, r], b [P, 9].
Initialisation: W_k zero, b what is usual for a match of that length, so that copies begin as
prompt lookup. Losses: Clover-LR's, on P.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int
from clover_jax.config import BaseConfig, LossSpec, RopeConfig
from clover_jax.drafters import clover_lr
from clover_jax.drafters.augmenting import absorb_positions
from clover_jax.drafters.clover_lr import CloverLR, CloverLRConfig, CloverLRState
from clover_jax.drafters.drafter import PAD_TOKEN, AcceptedPositions, Frozen, State
from clover_jax.drafters.lookup import REPEATS
from clover_jax.drafters.text_matches import MOST_MATCHED, last_tokens, match_lengths
from clover_jax.drafters.tokens import shift_left, to_draft
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache, KeyValue
from clover_jax.models.decoder import packed_mask
from clover_jax.models.layers import matrix_init

NEVER = -1e9  # a log of odds: its exp is 0, and its gradient no NaN
WITHOUT_MATCH = 0.02  # how often a copy is right, to begin with, that no match speaks for

init_from_base = clover_lr.init_from_base  # the pointer is as it was made


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloverCopyConfig(CloverLRConfig):
    """A Clover-Copy head.

    pointers: k, places that a step may copy from.
    pointer_rank: r, the dimensions in which states are compared.
    """

    kind: str = "clover_copy"
    pointers: int = 8
    pointer_rank: int = 64

    def __post_init__(self):
        super().__post_init__()
        if min(self.pointers, self.pointer_rank) < 1:
            raise ValueError(
                f"pointers ({self.pointers}) and pointer_rank ({self.pointer_rank}) must be at "
                "least 1: clover_lr is the head that copies nothing"
            )


class Pointers(struct.PyTreeNode):
    """Where T states point. A tree has one of them, and all its branches their own lengths.

    ahead:  [B, T, K, P] the tokens there, level by level; PAD_TOKEN where there is none.
    length: [B, W, K] m^i; W is T in training.
    score:  [B, T, K] a_n.
    """

    ahead: Int[Array, "B T k P"]
    length: Int[Array, "B W k"]
    score: Float[Array, "B T k"]

    def follow(self, token: Int[Array, "B W"], level: int) -> Pointers:
        """Move on, after `token` was taken on this level."""
        longer = jnp.minimum(self.length + 1, MOST_MATCHED)
        is_right = self.ahead[..., level] == token[..., None]
        return self.replace(length=jnp.where(is_right, longer, 0))


class CloverCopyState(struct.PyTreeNode):
    """What a level of branches carries: Clover-LR's state, and where each branch points."""

    head: CloverLRState
    pointers: Pointers


class CloverCopy(CloverLR):
    """The Clover-Copy head; see the module's docstring for the equations."""

    config: CloverCopyConfig

    def setup(self):
        super().setup()
        cfg, shape = self.config, (self.config.layer.hidden_size, self.config.pointer_rank)
        self.point_from = self.param("point_from", matrix_init(shape[0]), shape)
        self.point_to = self.param("point_to", nn.initializers.zeros, shape)
        self.of_length = self.param("of_length", _usual_odds, (cfg.num_positions, MOST_MATCHED + 1))

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """Return the Augmenting Block's cache, and the keys that are pointed at."""
        keys = jnp.zeros((batch, length, self.config.pointer_rank), dtype)
        return *super().init_cache(batch, length, dtype), _keys_alone(keys)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[State, Cache]:
        """Run the trunk over accepted positions, and choose where the last one points."""
        trunk = functools.partial(self._trunk, frozen, accepted.features, accepted.next_tokens)
        root, cache = absorb_positions(trunk, accepted, cache)

        # What a row brought with it to copy from has no states, and is left out.
        keys = cache[-1].key[:, 0]
        end, size = (accepted.start + accepted.count)[:, None], keys.shape[1]
        # The last position, t = end - 1, is left out: its key points at x_{t+2}, not known yet.
        is_earlier = (jnp.arange(size) < end - 1)[:, None]
        text = accepted.text[:, :size]
        pointers = self._aim(root, keys, is_earlier, text, text, end)
        return CloverCopyState(self._root_state(frozen, root), pointers), cache

    def propose(self, frozen: Frozen, state: State, depth: int) -> Float[Array, "B W Vd"]:
        """Return Clover-LR's logits, mixed with the copies of each branch."""
        logits = super().propose(frozen, state.head, depth)
        tokens = to_draft(self.config, state.pointers.ahead[..., depth])
        return mix(logits, tokens, self._log_odds(state.pointers, depth))

    def advance(
        self,
        frozen: Frozen,
        state: State,
        cache: Cache,
        parent: Int[Array, "B W"],
        token: Int[Array, "B W"],
        depth: int,
    ) -> State:
        """Feed a drafted token back, and move the pointers on."""
        head = super().advance(frozen, state.head, cache, parent, token, depth)
        # All branches share the places pointed at; each has match lengths of its own.
        length = jnp.take_along_axis(state.pointers.length, parent[..., None], axis=1)
        pointers = state.pointers.replace(length=length).follow(token, depth - 1)
        return CloverCopyState(head, pointers)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D+r+4k"]:
        """Return [u^i ; C s^i ; tokens ; log odds], as if the text had been drafted."""
        tokens, mask = batch.tokens, packed_mask(batch.segment_ids)
        size = tokens.shape[1]
        z, fresh = self._trunk(frozen, features, shift_left(tokens, 1), batch.positions, mask)
        hidden = self._unrolled(frozen, z, tokens)

        # Words of different documents differ, so that no match goes beyond its own.
        words = tokens + self.config.vocab_size * batch.segment_ids
        end = jnp.broadcast_to(jnp.arange(1, size + 1), tokens.shape)
        # A state's own key would point at x_{t+2}, which it is to propose.
        is_earlier = mask & ~jnp.eye(size, dtype=bool)
        pointers = self._aim(z, fresh[-1].key[:, 0], is_earlier, tokens, words, end)
        copies = []
        # The trainer takes one array of states, so the copied tokens are columns of it.
        for depth in range(self.config.num_positions):
            ahead = to_columns(to_draft(self.config, pointers.ahead[..., depth]), z.dtype)
            odds = self._log_odds(pointers, depth).astype(z.dtype)
            copies.append(jnp.concatenate([ahead, odds], axis=-1))
            pointers = pointers.follow(shift_left(tokens, depth + 2), depth)
        return jnp.concatenate([hidden, jnp.stack(copies)], axis=-1)

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D+r+4k"], position: int
    ) -> Float[Array, "*b Vd"]:
        """Return log P^i, but for a constant."""
        width = self.config.layer.hidden_size + self.config.rank
        own, copies = hidden[..., :width], hidden[..., width:]
        tokens, odds = jnp.split(copies, [copies.shape[-1] // 4 * 3], axis=-1)
        return mix(super().logits(frozen, own, position), from_columns(tokens), odds)

    def _trunk(self, *inputs):
        z, fresh = super()._trunk(*inputs)
        return z, (*fresh, _keys_alone(z @ self.point_to))

    def _aim(
        self,
        z: Float[Array, "B T D"],
        keys: Float[Array, "B S r"],
        is_earlier: Bool[Array, "B T S"],
        text: Int[Array, "B S"],
        words: Int[Array, "B S"],
        end: Int[Array, "B T"],
    ) -> Pointers:
        """Choose the places that each state points at.

        is_earlier: whether the state of a key may be pointed at.
        words: what is matched: the text's tokens, or what tells more of them apart.
        end: where x_{t+1} lies, the last token that a state knows of.
        """
        score = jnp.einsum(
            "btr,bsr->bts", z @ self.point_from, keys, preferred_element_type=jnp.float32
        )
        # From states to the places two further on.
        size = text.shape[1]
        shift = ((0, 0), (0, 0), (2, 0))
        score = jnp.pad(score * self.config.pointer_rank**-0.5, shift)[..., :size]
        is_place = jnp.pad(is_earlier, shift)[..., :size]
        length = match_lengths(words, last_tokens(words, end))

        # Counted from the end, since the first is taken among equals.
        order = jnp.where(is_place, score + self.of_length[0].astype(jnp.float32)[length], NEVER)
        order = jax.lax.stop_gradient(order)[..., ::-1]
        best, back = jax.lax.top_k(order, min(self.config.pointers, size))
        place = size - 1 - back

        # What lies ahead of each, and round again from the end of the text.
        turn = jnp.maximum(end[..., None] + 1 - place, 1)[..., None]
        index = place[..., None] + jnp.arange(self.config.num_positions) % turn
        index = jnp.minimum(index, size - 1)
        ahead = jnp.take_along_axis(text, index.reshape(len(text), -1), axis=1)
        is_there = (best > NEVER)[..., None]
        return Pointers(
            ahead=jnp.where(is_there, ahead.reshape(index.shape), PAD_TOKEN),
            length=jnp.take_along_axis(length, place, axis=-1),
            score=jnp.take_along_axis(score, place, axis=-1),
        )

    def _log_odds(self, pointers: Pointers, level: int) -> Float[Array, "B W k"]:
        # A product: the gradient of a look-up is a scatter.
        of_length = jax.nn.one_hot(pointers.length, MOST_MATCHED + 1) @ self.of_length[level]
        return pointers.score + of_length


def mix(
    logits: Float[Array, "B V Vd"], tokens: Int[Array, "B T k"], log_odds: Float[Array, "B W k"]
) -> Float[Array, "B W Vd"]:
    """Return log P, but for a constant, of a head's logits and of copies at such odds to it.

    Tokens below 0, or beyond the vocabulary, stand for none.
    """
    # Copies of one token add up, and the first of them stands for all.
    same = tokens[..., None] == tokens[..., None, :]
    is_first = jnp.argmax(same, axis=-1) == jnp.arange(tokens.shape[-1])
    together = jax.nn.logsumexp(jnp.where(same, log_odds[..., None, :], NEVER), axis=-1)

    # log(q + o) = log q + softplus(log o - log q), for the few tokens that are copied.
    is_copy = is_first & (tokens >= 0) & (tokens < logits.shape[-1])
    # Entries that are no copy look up token 0 and add 0 to it.
    ids = jnp.broadcast_to(jnp.where(is_copy, tokens, 0), together.shape)
    own = jnp.take_along_axis(logits, ids, axis=-1) - jax.nn.logsumexp(logits, -1, keepdims=True)
    gain = jnp.where(is_copy, jax.nn.softplus(together - own), 0)
    rows = jnp.broadcast_to(logits, (*ids.shape[:-1], logits.shape[-1]))
    flat = rows.reshape(-1, rows.shape[-1])
    at = jnp.arange(len(flat))[:, None], ids.reshape(len(flat), -1)
    return flat.at[at].add(gain.reshape(len(flat), -1)).reshape(rows.shape)


def to_columns(tokens: Int[Array, "*b k"], dtype: jnp.dtype) -> Float[Array, "*b 3k"]:
    """Write tokens in numbers below 256, which bfloat16 holds; PAD_TOKEN becomes 2^24 - 1."""
    return jnp.concatenate([tokens >> shift & 0xFF for shift in (0, 8, 16)], axis=-1).astype(dtype)


def from_columns(columns: Float[Array, "*b 3k"]) -> Int[Array, "*b k"]:
    """Read what `to_columns` wrote."""
    low, middle, high = jnp.split(columns.astype(jnp.int32), 3, axis=-1)
    return low + (middle << 8) + (high << 16)


def _keys_alone(keys: Float[Array, "B S r"]) -> KeyValue:
    """Return keys as a cache holds them, with values of no width."""
    return KeyValue(key=keys[:, None], value=keys[:, None, :, :0])


def _usual_odds(key: Array, shape: tuple[int, int]) -> Float[Array, "P M"]:
    # Odds of a copy against the head's own choice: 1 : 1 where half of the copies are right.
    usual = jnp.array([WITHOUT_MATCH, *REPEATS[1:]])
    return jnp.broadcast_to(jnp.log(usual / (1 - usual)), shape)


def make_config(
    base: BaseConfig,
    num_features: int | None = None,
    rank: int | None = None,
    rope: RopeConfig | None = None,
    loss: LossSpec = clover_lr.METHOD_LOSS,
    pointers: int = 8,
    pointer_rank: int = 64,
    **options: Any,
) -> CloverCopyConfig:
    """Return the head's config for a base; what is not of pointers is as of Clover-LR."""
    head = clover_lr.make_config(
        base, num_features=num_features, rank=rank, rope=rope, loss=loss, **options
    )
    # Clover-LR chooses and checks the fields that both heads have; the kind is replaced.
    own = {"kind": "clover_copy", "pointers": pointers, "pointer_rank": pointer_rank}
    return CloverCopyConfig(**(vars(head) | own))
