"""Clover-2: a recurrent draft head with two Attention Decoders around an Augmenting Block.

Source: Clover-2 (arXiv 2408.00264) and the authors' release; where they disagree the choice is
noted. At position t, with h_t the base's state before its final norm and E the rows of lm_head:

    a_t = AttentionDecoder1(h_t, E[x_{t+1}])              the next token enters before the block
    s^0 = z_t = trunk_norm(AugmentingBlock(a_0 .. a_t))   attention over the whole prefix
    u^0 = head_norm(W_0 s^0 + b_0)                        lm_head u^0 proposes x_{t+2}
    s^i = AttentionDecoder2(s^{i-1}, E[x_{t+1+i}])        the regressive connection
    u^i = head_norm(W_1 [s^i ; E[x_{t+1+i}]] + b_1)       lm_head u^i proposes x_{t+2+i}

with AttentionDecoder(x, e) = x + cos(q(x), k(e)) v(e), head by head (`attention_decoder.py`).

Options leave out or reorder parts, as in the paper's ablation; see `Clover2Config`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import BaseConfig, DrafterConfig, LossSpec, RopeConfig
from clover_jax.drafters.attention_decoder import (
    AttentionDecoder,
    check_heads,
    default_heads,
    with_matrices,
)
from clover_jax.drafters.augmenting import (
    augment,
    check_depth,
    from_last_layer,
    initial_state_size,
    run_trunk,
    silent_layers,
    unit_rms,
)
from clover_jax.drafters.drafter import AcceptedPositions, Drafter, Frozen, Ids, layer_for
from clover_jax.drafters.tokens import embed, extend, shift_left, window
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache, init_cache
from clover_jax.models.decoder import DecoderLayer, packed_mask
from clover_jax.models.layers import RMSNorm, matrix_init

NOISE = 0.01  # width of the release's uniform initialization noise
# The release has regression=10, soft_ce=1, decay=0.7: less tau on each base that both were tried on
# (experiments/results/losses.md).
METHOD_LOSS = LossSpec(regression=1.0, soft_ce=1.0, total_variation=2.0, decay=0.8, dpace=0.5)
ORDERS = ("decoder_first", "block_first")
INITS = ("identity", "paper")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clover2Config(DrafterConfig):
    """A Clover-2 head; non-default values give the paper's ablations.

    num_augmenting_layers: depth of the Augmenting Block (release: 2).
    order: "decoder_first": Attention Decoder 1 comes before the Augmenting Block, which so
        sees x_{t+1}; "block_first": after it, as in Clover.
    output_projector: False leaves out W_0 and W_1: u^i = head_norm(s^i).
    decoder_heads: heads of both Attention Decoders; 0 for heads as wide as the base's.
    unit_states: whether the base's states are first scaled to one RMS (`initial_state_size`).
    init: "identity": the head starts as the base's own prediction, whatever the base's scales are;
        "paper": as in the release, with noise and with the final norm in both norms.
    """

    kind: str = "clover2"
    num_augmenting_layers: int = 2
    order: str = "decoder_first"
    output_projector: bool = True
    decoder_heads: int = 0
    unit_states: bool = False
    init: str = "identity"

    def __post_init__(self):
        super().__post_init__()
        check_depth(self.num_augmenting_layers)
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is not one of {', '.join(ORDERS)}")
        if self.init not in INITS:
            raise ValueError(f"init {self.init!r} is not one of {', '.join(INITS)}")
        check_heads(self.layer, self.decoder_heads)


class Clover2State(struct.PyTreeNode):
    """The recurrent state of W branches.

    hidden: [B, W, D] s^i.
    embedded: [B, W, D] the embedding of the token that led here; unused at the root.
    """

    hidden: Float[Array, "B W D"]
    embedded: Float[Array, "B W D"]


class Clover2(Drafter):
    """The Clover-2 head; see the module's docstring for the equations."""

    config: Clover2Config

    @property
    def scale_params(self) -> tuple[str, ...]:
        return ("head_norm",) if self.config.init == "identity" else ()

    def setup(self):
        cfg = self.config
        width = cfg.layer.hidden_size
        matrix, zeros = matrix_init(width), nn.initializers.zeros
        if cfg.unit_states:
            self.state_size = self.param("state_size", nn.initializers.ones, (1,))

        self.attention_decoder_1 = AttentionDecoder(cfg.layer, num_heads=cfg.decoder_heads)
        self.augmenting = [DecoderLayer(cfg.layer) for _ in range(cfg.num_augmenting_layers)]
        self.trunk_norm = RMSNorm(cfg.layer.rms_norm_eps)
        self.attention_decoder_2 = AttentionDecoder(cfg.layer, num_heads=cfg.decoder_heads)
        self.head_norm = RMSNorm(cfg.layer.rms_norm_eps)
        if cfg.output_projector:
            self.projector_0 = self.param("projector_0", matrix, (width, width))
            self.projector_0_bias = self.param("projector_0_bias", zeros, (width,))
            self.projector_1 = self.param("projector_1", matrix, (2, width, width))
            self.projector_1_bias = self.param("projector_1_bias", zeros, (width,))

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        layers = self.config.num_augmenting_layers
        return init_cache(self.config.layer, layers, batch, length, dtype)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[Clover2State, Cache]:
        trunk = functools.partial(self._trunk, frozen, accepted.features, accepted.next_tokens)
        root, cache = run_trunk(trunk, accepted, cache)
        return Clover2State(hidden=root, embedded=jnp.zeros_like(root)), cache

    def propose(self, frozen: Frozen, state: Clover2State, depth: int) -> Float[Array, "B W Vd"]:
        # s^0 contains the root's token; later states are projected together with their own tokens.
        if depth == 0:
            return self.logits(frozen, self._first_output(state.hidden), depth)
        return self.logits(frozen, self._joint_output(state), depth)

    def advance(
        self, frozen: Frozen, state: Clover2State, cache: Cache, parent: Ids, token: Ids, depth: int
    ) -> Clover2State:
        """Feed a drafted token back: the regressive connection."""
        above = jnp.take_along_axis(state.hidden, parent[..., None], axis=1)
        embedded = embed(frozen, token)
        return Clover2State(self.attention_decoder_2(above, embedded), embedded)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D"]:
        """Return u^i_t under teacher forcing; a segment's last i + 1 positions have no pair."""
        # s^0 of every text position at once.
        tokens, mask = batch.tokens, packed_mask(batch.segment_ids)
        z, _ = self._trunk(frozen, features, shift_left(tokens, 1), batch.positions, mask)
        # One position trains no regressive connection, but a deeper tree needs its params.
        trained = self.config.num_positions
        count = max(trained, 2) if self.is_initializing() else trained
        # What depends on the token alone is computed once; every position shifts it further.
        embedded = embed(frozen, extend(tokens, count))
        key_value = self.attention_decoder_2.read(embedded)
        projected = self._project_token(embedded)

        # Teacher forcing: position i follows the text's token, not its own proposal.
        state, outputs = z, [self._first_output(z)]
        for depth in range(1, count):
            shifted = functools.partial(window, start=depth + 1, size=tokens.shape[1])
            state = self.attention_decoder_2.mix(state, shifted(key_value))
            # u^i, from the state and what `_project_token` gave.
            output = state
            if self.config.output_projector:
                output = state @ self.projector_1[0] + shifted(projected) + self.projector_1_bias
            outputs.append(self.head_norm(output))
        return jnp.stack(outputs[:trained])

    def _trunk(self, frozen, features, next_tokens, positions, mask, cache=None, length=None):
        """Return s^0 and the Augmenting Block's fresh keys and values."""
        # The order is the paper's main change: early, the token reaches every augmenting layer.
        embedded, layers = embed(frozen, next_tokens), self.augmenting
        if self.config.unit_states:
            features = self.state_size * unit_rms(features)
        if self.config.order == "decoder_first":
            a = self.attention_decoder_1(features, embedded)
            z, fresh = augment(layers, a, positions, mask, cache, length)
            return self.trunk_norm(z), fresh
        z, fresh = augment(layers, features, positions, mask, cache, length)
        return self.attention_decoder_1(self.trunk_norm(z), embedded), fresh

    def _first_output(self, state: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        if self.config.output_projector:
            state = state @ self.projector_0 + self.projector_0_bias
        return self.head_norm(state)

    # u^i = head_norm(W_1 [s ; e] + b_1) is computed in two ways. Drafting takes one product with
    # all of W_1, since a GPU would copy half of it first (`_joint_output`). Training splits it into
    # W_1s s + W_1e e, because the token's part is shared among positions (`_project_token`).
    def _joint_output(self, branch: Clover2State) -> Float[Array, "B W D"]:
        """Return u^i of drafted branches."""
        x = branch.hidden
        if self.config.output_projector:
            both = jnp.stack([x, branch.embedded], axis=-2)  # not along D, which a mesh may split
            matrix = self.projector_1.reshape(-1, x.shape[-1])
            x = both.reshape(*x.shape[:-1], -1) @ matrix + self.projector_1_bias
        return self.head_norm(x)

    def _project_token(self, embedded: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Return W_1e e."""
        if not self.config.output_projector:
            return jnp.zeros_like(embedded)
        return embedded @ self.projector_1[1]


def make_config(
    base: BaseConfig,
    rope: RopeConfig | None = None,
    loss: LossSpec = METHOD_LOSS,
    decoder_heads: int = 0,
    init: str = Clover2Config.init,
    **options: Any,
) -> Clover2Config:
    """Return the head's config for a base; the rotary base is the base's own unless given.

    decoder_heads: heads of the Attention Decoders; 0 for the base's where these divide the width.
    """
    # Augmenting layers have the base's shape, because they start as its last layer. Where the base
    # norms what attention and MLP return (Gemma), these cannot start at zero: the head's layers
    # leave those norms out, and its states are scaled to one size.
    layer = layer_for(base, rope)
    unit_states = init == "identity" and layer.post_norms
    return Clover2Config(
        layer=layer.with_plain_branches() if unit_states else layer,
        unit_states=unit_states,
        vocab_size=base.vocab_size,
        loss=loss,
        decoder_heads=decoder_heads or default_heads(layer),
        init=init,
        **options,
    )


def init_from_base(
    config: Clover2Config, params: Params, base_params: Params, rng: Array
) -> Params:
    """Initialize as the config's `init` says.

    "identity": the head starts as the base. The Augmenting Block's layers read as the base's last
    ones and add nothing at first. The state passes the final norm once, in trunk_norm; every matrix
    after it is the identity, and head_norm keeps the length that the final norm's scale gives a
    state on average. Values start at zero. No noise: the final norm of a published base multiplies
    some channels by hundreds, and noise there drowns the state.

    "paper": every augmenting layer copies the base's last layer (the release copies layer 0,
    because it reads the layer count from the draft's config), both norms start as the final norm,
    and U(0, 0.01) is added to every matrix.
    """
    # A decoder whose query and key are the identity and whose value is zero passes its input on.
    identity = jnp.eye(config.layer.hidden_size)
    final_norm = base_params["final_norm"]
    # A key for each call of `start`: two in each decoder, and one for each projector.
    keys = iter(jax.random.split(rng, 6))
    noise = NOISE if config.init == "paper" else 0.0

    def start(matrix: Array) -> Array:
        return matrix + jax.random.uniform(next(keys), matrix.shape, maxval=noise)

    starts_as = silent_layers if config.init == "identity" else from_last_layer
    new: dict[str, Any] = starts_as(config, base_params, config.num_augmenting_layers)
    for name in ("attention_decoder_1", "attention_decoder_2"):
        query = start(identity)
        key_value = start(jnp.stack([identity, jnp.zeros_like(identity)], axis=1))
        new[name] = with_matrices(params[name], query, key_value)

    if config.unit_states:
        new["state_size"] = initial_state_size(base_params)
    new |= {"trunk_norm": final_norm, "head_norm": final_norm}
    if config.init == "identity":
        scale = final_norm["scale"]
        length = jnp.sqrt(jnp.mean(scale.astype(jnp.float32) ** 2))
        new["head_norm"] = {"scale": jnp.full(scale.shape, length)}
    if config.output_projector:
        new["projector_0"] = start(identity)
        new["projector_1"] = start(jnp.stack([identity, jnp.zeros_like(identity)]))
    return new
