"""Clover-LR: one block of proposals, then a low-rank regressive correction.

Clover-2 passes over lm_head once for every drafted position: on a vocabulary of 128k that is three
quarters of what its draft reads. Here the trunk proposes all P positions in *one* batched pass, and
what a drafted token changes is a correction of rank r. With f_t the base's states entering some of
its layers, h_t its last one, and E the rows of lm_head:

    x_t = k rms(h_t) + sum_j W_f^j rms(f_t^j)              fused features; starts as h_t, of size k
    a_t = x_t + W_t rms(e'_{t+1})                          e' a row of the base's input embedding
    z_t = rms(AugmentingBlock(a_0 .. a_t))                 as in Clover-2
    u^i = c * z_t + W_i z_t + b_i,  i = 0 .. P-1           all positions at once
    s^0 = tanh(W_s z_t)                                    [r]
    s^i = GRU(s^{i-1}, W_e e_{t+1+i})                      the regressive connection; e = rms(E[x])
    logits^i = lm_head u^i + R C s^i                       proposes x_{t+2+i}; C s^0 counts as 0

rms(x) has a mean square of 1.

Scales. Bases differ by orders of magnitude in the size of a state, in the weights of the final norm
(0.19 to 301 in Gemma 3 270M) and in the length of a row of lm_head. So the head works on states of
one size, k, to which nothing is added at first that the base made for states of its own size. k
grows with what a change of a unit state does to the logits (`initial_state_size`), so that a step
of training moves them as far on every base. The final norm's weights, c, come once, at the end,
where lm_head needs them. What is learned is added behind them, or the largest would multiply it by
hundreds. So the head begins as the base's own prediction.

The newest token enters by a matrix, as in EAGLE, and not by an Attention Decoder, as in Clover-2:
that reads one [D, D] for three, and drafts more.

W_f, W_i, W_t [D, D], W_s, W_e [D, r], C [r, r], R [V, r]. Initialization: W_f, W_t, W_i, b_i zero;
the Augmenting Block's layers as the base's last ones, one each, in their order, but for what they
write, which is zero; W_s, W_e of orthonormal columns; C zero, so that the correction begins at
nothing; R = lm_head Q with Q the r directions along which lm_head's rows are longest, so that
similar tokens begin with similar corrections.

Losses: the regression, on u alone; the soft cross-entropy and twice the total variation, on the
corrected logits. A position weighs what it is worth for the accepted length (D-PACE); without
D-PACE position i weighs 0.8^i. What each part brings is in experiments/results/next_head.md.

In training x_{t+2}, x_{t+3}, .. are the text's; the states are the head's own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, DrafterConfig, LossSpec, RopeConfig
from clover_jax.drafters.augmenting import (
    augment,
    check_depth,
    initial_state_size,
    run_trunk,
    silent_layers,
    unit_rms,
)
from clover_jax.drafters.drafter import (
    AcceptedPositions,
    Drafter,
    Frozen,
    check_max_depth,
    frozen_from_base,
    layer_for,
    output_matrix,
    with_draft_rows,
)
from clover_jax.drafters.tokens import embed, embed_input, extend, shift_left, window
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache, init_cache
from clover_jax.models.decoder import DecoderLayer, packed_mask, project
from clover_jax.models.int8 import contract, widen
from clover_jax.models.layers import RMSNorm, matrix_init
from clover_jax.models.score_rules import soft_cap

DEFAULT_RANK = 256
DEFAULT_FEATURES = 3
REVISION = 2  # 1 normed the state before the block, and again behind W_i
METHOD_LOSS = LossSpec(regression=1.0, soft_ce=1.0, total_variation=2.0, decay=0.8, dpace=0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloverLRConfig(DrafterConfig):
    """A Clover-LR head.

    rank: r, width of the recurrent state and rank of the correction; 0 drafts without feedback.
    num_augmenting_layers: depth of the Augmenting Block.
    revision: of the equations; heads of others are refused.
    """

    kind: str = "clover_lr"
    rank: int = DEFAULT_RANK
    num_augmenting_layers: int = 2
    revision: int = REVISION

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from `to_dict`'s output.

        Raises ValueError for a head of other equations than today's.
        """
        if values.get("revision") != REVISION:
            raise ValueError(
                f"it is a Clover-LR head of revision {values.get('revision', 1)}, but this version "
                f"has the equations of revision {REVISION}: train it again, or decode with the "
                "version that trained it"
            )
        return super().from_dict(values)

    def __post_init__(self):
        super().__post_init__()
        # The Augmenting Block has Clover-2's bounds.
        check_depth(self.num_augmenting_layers)
        if not 0 <= self.rank <= self.layer.hidden_size:
            raise ValueError(
                f"rank ({self.rank}) must lie between 0 and hidden_size ({self.layer.hidden_size})"
            )

        # The fusion starts as the last state, so that must be among the features, and last.
        if self.features[-1] != "pre_norm":
            raise ValueError(f"the last of the features {self.features} must be pre_norm")
        check_max_depth(self, "the block proposes no more")


class GatedRecurrence(nn.Module):
    """A gated recurrent unit: s' = (1 - gate) s + gate tanh(candidate [reset * s ; e]).

    gate and reset are sigmoids of [s ; e].
    """

    rank: int

    @nn.compact
    def __call__(
        self, state: Float[Array, "*b r"], token: Float[Array, "*b r"]
    ) -> Float[Array, "*b r"]:
        rank, init = self.rank, nn.initializers.lecun_normal()
        # `gates` holds gate and reset; the candidate is separate, as it reads the reset state.
        gates = self.param("gates", init, (2, 2 * rank, rank))
        biases = self.param("gates_bias", nn.initializers.zeros, (2, rank))
        matrix = self.param("candidate", init, (2 * rank, rank))
        both = jnp.concatenate([state, token], axis=-1)
        gate, reset = (nn.sigmoid(both @ gates[i] + biases[i]) for i in range(2))
        candidate = jnp.tanh(jnp.concatenate([reset * state, token], axis=-1) @ matrix)
        return state + gate * (candidate - state)


class CloverLRState(struct.PyTreeNode):
    """What a level of branches carries.

    block_logits: [B, P, Vd] logits of all positions before any correction, shared by all branches.
    recurrent: [B, W, r] s^i.
    """

    block_logits: Float[Array, "B P Vd"]
    recurrent: Float[Array, "B W r"]


class CloverLR(Drafter):
    """The Clover-LR head; see the module's docstring for the equations."""

    config: CloverLRConfig
    scale_params = ("output_scale",)

    @property
    def output_params(self) -> tuple[str, ...]:
        """What `logits` reads besides the base's lm_head."""
        return ("correction_out",) if self.config.rank else ()

    def setup(self):
        # The trunk: what the base and the newest token say, and the Augmenting Block.
        cfg = self.config
        width, rank, num_features = cfg.layer.hidden_size, cfg.rank, len(cfg.features)
        matrix, zeros = matrix_init(width), nn.initializers.zeros
        self.state_size = self.param("state_size", nn.initializers.ones, (1,))
        if num_features > 1:
            self.fuse = self.param("fuse", zeros, (num_features - 1, width, width))
        self.token_mix = self.param("token_mix", matrix, (width, width))
        self.augmenting = [DecoderLayer(cfg.layer) for _ in range(cfg.num_augmenting_layers)]
        self.trunk_norm = RMSNorm(cfg.layer.rms_norm_eps)
        self.output_scale = self.param("output_scale", nn.initializers.ones, (width,))
        # One matrix of P D columns: a stack of P matrices is copied at every step.
        self.block = self.param("block", matrix, (width, cfg.num_positions, width))
        self.block_bias = self.param("block_bias", zeros, (cfg.num_positions, width))
        # The correction, none of it wider than r.
        if rank:
            self.correction_out = self.param("correction_out", zeros, (cfg.draft_vocab_size, rank))
            self.state_in = self.param("state_in", matrix, (width, rank))
            self.token_in = self.param("token_in", matrix, (width, rank))
            self.recurrence = GatedRecurrence(rank)
            self.mix = self.param("mix", zeros, (rank, rank))

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        layers = self.config.num_augmenting_layers
        return init_cache(self.config.layer, layers, batch, length, dtype)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[CloverLRState, Cache]:
        """Run the trunk over accepted positions, and the one pass over lm_head at the last."""
        trunk = functools.partial(self._trunk, frozen, accepted.features, accepted.next_tokens)
        root, cache = run_trunk(trunk, accepted, cache)

        # The one pass over the vocabulary of this step: every level reads its own part.
        block = project(output_matrix(self.config, frozen), self._position_outputs(root[:, 0]))
        return CloverLRState(block_logits=block, recurrent=self._first(root)), cache

    def propose(self, frozen: Frozen, state: CloverLRState, depth: int) -> Float[Array, "B W Vd"]:
        """Return the block's logits of this level, corrected for each branch."""
        logits = state.block_logits[:, depth, None]
        # Level 0 has no correction (C s^0 is 0): the block's input contains the root's token.
        if depth and self.config.rank:
            logits = logits + project(self.correction_out, state.recurrent @ self.mix)
        return soft_cap(logits, self.config.logit_cap)

    def advance(
        self,
        frozen: Frozen,
        state: CloverLRState,
        cache: Cache,
        parent: Int[Array, "B W"],
        token: Int[Array, "B W"],
        depth: int,
    ) -> CloverLRState:
        if not self.config.rank:
            return state
        # Rank r, not D: this is all that a drafted token costs.
        above = jnp.take_along_axis(state.recurrent, parent[..., None], axis=1)
        following = self.recurrence(above, unit_rms(embed(frozen, token)) @ self.token_in)
        return CloverLRState(block_logits=state.block_logits, recurrent=following)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D+r"]:
        """Return [u^i ; C s^i], the latter 0 at position 0; teacher forced."""
        # The block of every text position at once.
        tokens, mask = batch.tokens, packed_mask(batch.segment_ids)
        z, _ = self._trunk(frozen, features, shift_left(tokens, 1), batch.positions, mask)
        block = jnp.moveaxis(self._position_outputs(z), -2, 0)
        if not self.config.rank:
            return block
        if self.is_initializing():  # one position trains no feedback, but all params are made
            self.recurrence(self._first(z), self._first(z))

        # Then the recurrence, one position after another.
        state = self._first(z)
        corrections = [jnp.zeros_like(state)]
        # What depends on a token alone is computed once; every position shifts it further.
        embedded = unit_rms(embed(frozen, extend(tokens, len(block)))) @ self.token_in
        for depth in range(1, len(block)):
            state = self.recurrence(state, window(embedded, depth + 1, tokens.shape[1]))
            corrections.append(state @ self.mix)
        return jnp.concatenate([block, jnp.stack(corrections)], axis=-1)

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D+r"], position: int
    ) -> Float[Array, "*b Vd"]:
        """Return lm_head u + R C s, within the base's soft cap."""
        width = self.config.layer.hidden_size
        logits = project(output_matrix(self.config, frozen), hidden[..., :width])
        # As in `propose`: nothing is corrected at position 0.
        if position and self.config.rank:
            logits = logits + project(self.correction_out, hidden[..., width:])
        return soft_cap(logits, self.config.logit_cap)

    def _trunk(self, frozen, features, next_tokens, positions, mask, cache=None, length=None):
        # The last state passes untouched: W_f and W_t start at zero, so all else only adds.
        each = unit_rms(features.reshape(*features.shape[:-1], len(self.config.features), -1))
        x = self.state_size * each[..., -1, :]
        if len(self.config.features) > 1:
            x = x + contract("...fd,fde->...e", each[..., :-1, :], self.fuse)
        token = unit_rms(embed_input(self.config, frozen, next_tokens))
        x = x + contract("...d,de->...e", token, self.token_mix)

        x, fresh = augment(self.augmenting, x, positions, mask, cache, length)
        return self.trunk_norm(x), fresh

    def _position_outputs(self, z: Float[Array, "*b D"]) -> Float[Array, "*b P D"]:
        learned = contract("...d,dpe->...pe", z, self.block) + self.block_bias
        return (self.output_scale * z)[..., None, :] + learned

    def _first(self, z: Float[Array, "*b D"]) -> Float[Array, "*b r"]:
        """Return s^0."""
        return jnp.tanh(z @ self.state_in) if self.config.rank else z[..., :0]


def make_config(
    base: BaseConfig,
    num_positions: int = 5,
    num_features: int | None = None,
    rank: int | None = None,
    rope: RopeConfig | None = None,
    loss: LossSpec = METHOD_LOSS,
    **options: Any,
) -> CloverLRConfig:
    """Return the head's config for a base.

    num_features: 1 reads the base's last state only, more add states entering evenly spaced layers;
        by default 3, or as many as the base has layers.
    rank: 256, or half the base's width where that is less.
    Raises ValueError for what no such head can be.
    """
    # Features of evenly spaced layers; the last one is the base's own last state.
    depth = base.num_layers
    count = min(DEFAULT_FEATURES, depth) if num_features is None else num_features
    if not 1 <= count <= depth:
        raise ValueError(f"num_features ({count}) must lie between 1 and the base's {depth} layers")
    layers = tuple(f"layer_{depth * j // count}" for j in range(1, count))

    return CloverLRConfig(
        # Branches that are normed, as Gemma's, cannot begin at nothing.
        layer=layer_for(base, rope).with_plain_branches(),
        vocab_size=base.vocab_size,
        num_positions=num_positions,
        max_depth=num_positions,
        features=(*layers, "pre_norm"),
        # A narrow base has no room for the default rank.
        rank=min(DEFAULT_RANK, base.hidden_size // 2) if rank is None else rank,
        loss=loss,
        **options,
    )


def init_from_base(
    config: CloverLRConfig, params: Params, base_params: Params, rng: Array
) -> Params:
    """Initialize the head as the base, and all that it adds at nothing."""
    lm_head = base_params.get("lm_head", base_params["embedding"])
    layers = silent_layers(config, base_params, config.num_augmenting_layers)
    new: dict[str, Any] = layers | {
        "state_size": initial_state_size(base_params),
        "output_scale": base_params["final_norm"]["scale"],
        "token_mix": jnp.zeros_like(params["token_mix"]),
        "block": jnp.zeros_like(params["block"]),
    }

    # The correction starts at nothing, along the directions that tell tokens apart best.
    if config.rank:
        width = config.layer.hidden_size
        random = jax.random.normal(rng, (width, width))
        directions = principal_directions(lm_head, config.rank)
        # QR makes random columns orthonormal.
        new["state_in"] = jnp.linalg.qr(random)[0][:, : config.rank]
        # R has a row for each token that the head may propose.
        rows = output_matrix(config, frozen_from_base(with_draft_rows(base_params, config)))
        new |= {
            "token_in": directions,
            "correction_out": widen(rows, directions.dtype) @ directions,
        }
    return new


def principal_directions(matrix: Float[Array, "V D"], rank: int) -> Float[Array, "D r"]:
    """Return the `rank` orthonormal directions along which the rows are longest, largest first.

    About the origin, not the rows' mean.
    """
    gram = jnp.einsum("vd,ve->de", matrix, matrix, preferred_element_type=jnp.float32)
    return jnp.linalg.eigh(gram)[1][:, ::-1][:, :rank]
