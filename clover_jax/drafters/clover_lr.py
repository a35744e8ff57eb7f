"""Clover-LR: one block of proposals, then a low-rank regressive correction.

Clover-2 passes over lm_head once for every drafted position: on a vocabulary of 128k that is three
quarters of what its draft reads. Here the trunk proposes all P positions in *one* batched pass, and
what a drafted token changes is a correction of rank r. With f_t the base's states entering some of
its layers, h_t its last one, and E the rows of lm_head:

    x_t = unit(h_t + sum_j W_f^j f_t^j)                    fused features; starts as h_t
    a_t = AttentionDecoder1(x_t, e_{t+1})                  e_t = unit(E[x_t])
    z_t = trunk_norm(AugmentingBlock(a_0 .. a_t))          as in Clover-2
    u^i = head_norm(W_i z_t + b_i),  i = 0 .. P-1          all positions at once
    s^0 = tanh(W_s z_t)                                    [r]
    s^i = GRU(s^{i-1}, W_e e_{t+1+i})                      the regressive connection, rank r
    logits^i = lm_head u^i + R C s^i                       proposes x_{t+2+i}; C s^0 counts as 0

unit(x) has a mean square of 1. A base's last state may be tens of times larger than its rows of
lm_head: left so (`unit_inputs=false`), as Clover-2 leaves them, the head learns slowly what a token
says.

W_f, W_i [D, D], W_s, W_e [D, r], C [r, r], R [V, r]. Initialisation: W_f zero; the trunk as in
Clover-2; W_i the identity plus U(0, 0.01); W_s, W_e orthonormal columns; C zero, so that the
correction begins at nothing; R = lm_head Q with Q the r directions along which lm_head's rows are
longest, so that similar tokens begin with similar corrections. But for `unit`, position 0 begins as
Clover-2's.

Losses: the regression, on u alone; the soft cross-entropy and twice the total variation, on the
corrected logits; position i weighs 0.8^i.

In training x_{t+2}, x_{t+3}, .. are the text's. With `drafted_share` > 0 some of them are what the
head itself proposes there, its most probable token, at random: none at first, that share at the
end, without a gradient through the choice. The targets stay the text's, since the base is known
there alone. EAGLE-3 and HASS do likewise with states, feeding back their own against the text's
targets, and keep the text's tokens; the states here are the head's own in any case.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.drafters.attention_decoder import AttentionDecoder, unit, with_matrices
from clover_jax.drafters.augmenting import absorb_positions, augment, from_last_layer
from clover_jax.drafters.clover_lr_config import CloverLRConfig, make_config
from clover_jax.drafters.drafted_tokens import most_probable_tokens, some_replaced
from clover_jax.drafters.drafter import Frozen, frozen_from_base, output_matrix, with_draft_rows
from clover_jax.drafters.recurrence import GatedRecurrence
from clover_jax.drafters.tokens import embed, extend, shift_left, window
from clover_jax.models.cache import Cache, init_cache
from clover_jax.models.decoder import DecoderLayer, packed_mask, project
from clover_jax.models.int8 import contract
from clover_jax.models.layers import RMSNorm

__all__ = ["CloverLR", "CloverLRConfig", "init_from_base", "make_config"]  # the registry's

NOISE = 0.01  # of the initialisation, as Clover-2's


@struct.dataclass
class CloverLRState:
    """What a level of branches carries.

    block: [B, P, Vd] logits of all positions before any correction, shared by all branches.
    state: [B, W, r] s^i.
    """

    block: Float[Array, "B P Vd"]
    state: Float[Array, "B W r"]


class CloverLR(nn.Module):
    """The Clover-LR head; see the module's docstring for the equations."""

    config: CloverLRConfig
    follows_progress = True  # of training: the share of drafted tokens grows with it

    @property
    def output_params(self) -> tuple[str, ...]:
        """What `logits` reads besides the base's lm_head."""
        return ("correction_out",) if self.config.rank else ()

    def setup(self):
        cfg = self.config
        width, rank, num_features = cfg.layer.hidden_size, cfg.rank, len(cfg.features)
        matrix, zeros = nn.initializers.normal(width**-0.5), nn.initializers.zeros
        if num_features > 1:
            self.fuse = self.param("fuse", zeros, (num_features - 1, width, width))
        self.attention_decoder_1 = AttentionDecoder(cfg.layer)
        self.augmenting = [DecoderLayer(cfg.layer) for _ in range(cfg.num_augmenting_layers)]
        self.trunk_norm = RMSNorm(cfg.layer.rms_norm_eps)
        # One matrix of P D columns: a stack of P is laid out anew at every step.
        self.block = self.param("block", matrix, (width, cfg.num_positions, width))
        self.block_bias = self.param("block_bias", zeros, (cfg.num_positions, width))
        self.head_norm = RMSNorm(cfg.layer.rms_norm_eps)
        if rank:
            self.correction_out = self.param("correction_out", zeros, (cfg.draft_vocab_size, rank))
            self.state_in = self.param("state_in", matrix, (width, rank))
            self.token_in = self.param("token_in", matrix, (width, rank))
            self.recurrence = GatedRecurrence(rank)
            self.mix = self.param("mix", zeros, (rank, rank))

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        """Return the Augmenting Block's cache."""
        layers = self.config.num_augmenting_layers
        return init_cache(self.config.layer, layers, batch, length, dtype)

    def absorb(
        self,
        frozen: Frozen,
        features: Float[Array, "B A F"],
        next_tokens: Int[Array, "B A"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        cache: Cache,
    ) -> tuple[CloverLRState, Cache]:
        """Run the trunk over accepted positions, and the one pass over lm_head at the last."""
        trunk = functools.partial(self._trunk, frozen, features, next_tokens)
        root, cache = absorb_positions(trunk, next_tokens.shape[1], start, count, cache)
        block = project(output_matrix(self.config, frozen), self._block(root[:, 0]))
        return CloverLRState(block=block, state=self._first(root)), cache

    def propose(self, frozen: Frozen, state: CloverLRState, depth: int) -> Float[Array, "B W Vd"]:
        """Return the block's logits of this level, corrected for each branch."""
        logits = state.block[:, depth, None]
        if depth == 0 or not self.config.rank:
            return logits
        return logits + project(self.correction_out, state.state @ self.mix)

    def advance(
        self,
        frozen: Frozen,
        state: CloverLRState,
        cache: Cache,
        parent: Int[Array, "B W"],
        token: Int[Array, "B W"],
        depth: int,
    ) -> CloverLRState:
        """Feed a drafted token back."""
        if not self.config.rank:
            return state
        above = jnp.take_along_axis(state.state, parent[..., None], axis=1)
        following = self.recurrence(above, self._embed(frozen, token) @ self.token_in)
        return CloverLRState(block=state.block, state=following)

    def train_forward(
        self,
        frozen: Frozen,
        features: Float[Array, "B S F"],
        tokens: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        rng: Array | None = None,
        progress: Float[Array, ""] | float = 0.0,
    ) -> Float[Array, "P B S D+r"]:
        """Return [u^i ; C s^i], the latter 0 at position 0.

        Teacher forced, but for the share of drafted tokens where `rng` chooses them.
        """
        mask = packed_mask(segment_ids)
        z, _ = self._trunk(frozen, features, shift_left(tokens, 1), positions, mask, None, None)
        block = jnp.moveaxis(self._block(z), -2, 0)
        if not self.config.rank:
            return block
        if self.is_initializing():  # one position trains no feedback, but all params are made
            self.recurrence(self._first(z), self._first(z))
        state = self._first(z)
        corrections = [jnp.zeros_like(state)]
        # What depends on a token alone is computed once; every position shifts it further.
        embedded = self._embed(frozen, extend(tokens, len(block))) @ self.token_in
        for depth in range(1, len(block)):
            following = window(embedded, depth + 1, tokens.shape[1])
            if rng is not None and self.config.drafted_share:
                above = jnp.concatenate([block[depth - 1], corrections[-1]], axis=-1)
                drafted = self._drafted(frozen, above, depth - 1)
                share, key = progress * self.config.drafted_share, jax.random.fold_in(rng, depth)
                following = some_replaced(key, share, following, by=drafted)
            state = self.recurrence(state, following)
            corrections.append(state @ self.mix)
        return jnp.concatenate([block, jnp.stack(corrections)], axis=-1)

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D+r"], position: int
    ) -> Float[Array, "*b Vd"]:
        """Return lm_head u + R C s."""
        width = self.config.layer.hidden_size
        logits = project(output_matrix(self.config, frozen), hidden[..., :width])
        if position == 0 or not self.config.rank:
            return logits
        return logits + project(self.correction_out, hidden[..., width:])

    def _drafted(
        self, frozen: Frozen, hidden: Float[Array, "B S D+r"], position: int
    ) -> Float[Array, "B S r"]:
        """Return W_e e of the token that the head itself proposes at each place."""
        logits = functools.partial(self.logits, frozen, position=position)
        tokens = most_probable_tokens(logits, hidden, self.config.draft_to_target)
        return self._embed(frozen, tokens) @ self.token_in

    def _trunk(self, frozen, features, next_tokens, positions, mask, cache, length):
        token = self._embed(frozen, next_tokens)
        x = self.attention_decoder_1(self._unit(self._fused(features)), token)
        x, fresh = augment(self.augmenting, x, positions, mask, cache, length)
        return self.trunk_norm(x), fresh

    def _fused(self, features: Float[Array, "B S F"]) -> Float[Array, "B S D"]:
        if len(self.config.features) == 1:
            return features
        each = features.reshape(*features.shape[:-1], len(self.config.features), -1)
        return each[..., -1, :] + contract("...fd,fde->...e", each[..., :-1, :], self.fuse)

    def _embed(self, frozen: Frozen, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
        return self._unit(embed(frozen, tokens))

    def _unit(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        if not self.config.unit_inputs:
            return x
        length = x.shape[-1] ** 0.5  # without an eps that counts: rows of lm_head may be small
        return (length * unit(x.astype(jnp.float32), 1e-6)).astype(x.dtype)

    def _block(self, z: Float[Array, "*b D"]) -> Float[Array, "*b P D"]:
        return self.head_norm(contract("...d,dpe->...pe", z, self.block) + self.block_bias)

    def _first(self, z: Float[Array, "*b D"]) -> Float[Array, "*b r"]:
        """Return s^0."""
        return jnp.tanh(z @ self.state_in) if self.config.rank else z[..., :0]


def init_from_base(
    config: CloverLRConfig, params: Params, base_params: Params, rng: Array
) -> Params:
    """Initialise so that position 0 begins as Clover-2's and the correction at nothing.

    Clover-2's exactly with `unit_inputs` off: a scaled state weighs otherwise beside what the block
    adds to it.
    """
    width, final_norm = config.layer.hidden_size, base_params["final_norm"]
    keys = iter(jax.random.split(rng, 4))
    identity = jnp.eye(width)

    def noisy(matrix: Array) -> Array:
        return matrix + jax.random.uniform(next(keys), matrix.shape, maxval=NOISE)

    query, key_value = noisy(identity), noisy(jnp.stack([identity, jnp.zeros_like(identity)], 1))
    lm_head = base_params.get("lm_head", base_params["embedding"])
    name = "attention_decoder_1"
    new: dict[str, Any] = from_last_layer(base_params, config.num_augmenting_layers) | {
        name: with_matrices(params[name], query, key_value),
        "trunk_norm": final_norm,
        "head_norm": final_norm,
        "block": noisy(jnp.broadcast_to(identity[:, None], params["block"].shape)),
    }
    if config.rank:
        random = jax.random.normal(next(keys), (width, width))
        directions = principal_directions(lm_head, config.rank)
        new["state_in"] = jnp.linalg.qr(random)[0][:, : config.rank]
        rows = output_matrix(config, frozen_from_base(with_draft_rows(base_params, config)))
        new |= {"token_in": directions, "correction_out": rows @ directions}
    return jax.tree.map(lambda old, x: jnp.array(x, old.dtype), params, {**params, **new})


def principal_directions(matrix: Float[Array, "V D"], rank: int) -> Float[Array, "D r"]:
    """Return the `rank` orthonormal directions along which the rows are longest, largest first.

    About the origin, not the rows' mean.
    """
    gram = jnp.einsum("vd,ve->de", matrix, matrix, preferred_element_type=jnp.float32)
    return jnp.linalg.eigh(gram)[1][:, ::-1][:, :rank]
