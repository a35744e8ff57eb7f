"""DFlash 2: one forward drafts a block of masks, and a selector chooses along its candidates.

Sources: DFlash (arXiv 2602.06036) and the public training code of DFlash 2. A block has P + 1
slots: slot 0 holds the anchor x_{t+1}, slots 1 .. P a reserved MASK, and slot k proposes x_{t+1+k}.
With f_t the base's states after some of its layers and e its input embedding:

    c_t = context_norm(fc f_t)                           what the base knows up to t
    h_k = e(x_{t+1}) at k = 0, e(MASK) above             for all slots at once; through the layers
    u_k = norm(h_k),  U_k = lm_head u_k                  proposes x_{t+1+k}
    S_k(a, b) = U_k(b) + <A[a] * G u_k, B[b]>            b one of the K largest of U_k

The layers (`block_layer.py`) let a slot see c_0 .. c_t and its whole block. Only c is cached.

The selector S tells which of the K candidates goes with the token a before it: a chain follows the
best, a tree branches over them, and softmax(S) over the K is what a sampled draft is drawn from.

Losses: the cross-entropy of U to the text, and that of S where the true token is one of the K, with
the text's token as a. Slot k weighs exp(-(k - 1) / gamma). A step trains blocks at M places of each
row, drawn again at each step; all of them go through one forward.

fc [n, D, D], A, B [V, r], G [D, r]. Initialization: A normal, B zero, so that the selector begins
at nothing; norm fitted to the first batch; the rest random. Without convolution (`conv_taps=0`) and
selector (`rank=0`) this is DFlash.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, DrafterConfig, LossSpec, RopeConfig
from clover_jax.drafters.augmenting import take_last
from clover_jax.drafters.block_layer import BlockLayer, BlockShape, attend_blocks, attend_last
from clover_jax.drafters.drafter import (
    AcceptedPositions,
    Drafter,
    FewTokens,
    Frozen,
    Ids,
    check_max_depth,
    head_logits,
    layer_for,
)
from clover_jax.drafters.tokens import embed_input
from clover_jax.models.batch import Batch
from clover_jax.models.cache import Cache, init_cache, ordered_after, write_rows
from clover_jax.models.decoder import Attend, project
from clover_jax.models.int8 import contract
from clover_jax.models.layers import RMSNorm, matrix_init
from clover_jax.models.placement import by_rows, over_rows_and_heads
from clover_jax.models.top_k import top_k

DEFAULT_RANK = 256
CODEBOOK_SPREAD = 0.02  # of A, to begin with


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(DrafterConfig):
    """A DFlash 2 head; a block has num_positions + 1 slots.

    mask_token_id: MASK, a token whose row of the base's input embedding no text needs.
    num_layers: m.
    rank: r, of the selector; 0 leaves it out.
    candidates: K, or as many as the draft's vocabulary has.
    conv_taps: slots that a convolution reads; 0 leaves it out.
    conv_group: g, channels that share a kernel.
    num_anchors: places of a row at most where a training step drafts a block.
    """

    kind: str = "dflash2"
    mask_token_id: int
    num_layers: int = 5
    rank: int = DEFAULT_RANK
    candidates: int = 16
    conv_taps: int = 2
    conv_group: int = 16
    num_anchors: int = 512

    def __post_init__(self):
        super().__post_init__()
        counts = (self.num_layers, len(self.features), self.num_anchors)
        if min(counts) < 1:
            raise ValueError(
                "num_layers ({}), the number of features ({}) and num_anchors ({}) must be at "
                "least 1".format(*counts)
            )
        check_max_depth(self, "the block proposes no more")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id ({self.mask_token_id}) must lie in 0 .. {self.vocab_size - 1}"
            )

        # What the selector chooses from, and what the convolution shares.
        if self.rank < 0 or self.candidates < 1:
            raise ValueError(
                f"rank ({self.rank}) must be at least 0, and candidates ({self.candidates}) 1"
            )
        if self.conv_taps < 0 or self.conv_group < 1 or self.layer.hidden_size % self.conv_group:
            raise ValueError(
                f"conv_taps ({self.conv_taps}) must be at least 0, and conv_group "
                f"({self.conv_group}) divide hidden_size ({self.layer.hidden_size})"
            )

    @property
    def block(self) -> BlockShape:
        """The shape of a block; the anchor has a slot, too."""
        return BlockShape(self.num_positions + 1, self.conv_taps, self.conv_group)


class DFlash2State(struct.PyTreeNode):
    """What a level of branches carries; all but the token is shared by all of them.

    ids:    [B, P, K] the most probable tokens of each slot.
    logits: [B, P, K] U of these.
    gate:   [B, P, r] G u.
    token:  [B, W] each branch's last token.
    """

    ids: Int[Array, "B P k"]
    logits: Float[Array, "B P k"]
    gate: Float[Array, "B P r"]
    token: Int[Array, "B W"]


class DFlash2(Drafter):
    """The DFlash 2 head; see the module's docstring for the equations."""

    config: DFlash2Config
    linear_params = ("norm",)

    @property
    def num_anchors(self) -> int:
        return self.config.num_anchors

    @property
    def rescores(self) -> bool:
        return self.config.rank > 0

    @property
    def output_params(self) -> tuple[str, ...]:
        """What `rescore` reads."""
        return ("successor",) if self.config.rank else ()

    def setup(self):
        cfg = self.config
        width, eps, count = cfg.layer.hidden_size, cfg.layer.rms_norm_eps, len(cfg.features)
        # One matrix for each feature; `_context` sums up their products.
        self.fc = self.param("fc", matrix_init(count * width), (count, width, width))
        self.context_norm = RMSNorm(eps)
        self.layers = [BlockLayer(cfg.layer, cfg.block) for _ in range(cfg.num_layers)]
        self.norm = RMSNorm(eps)
        # The selector: of the token before, of the state, of the candidate.
        if cfg.rank:
            codebook, zeros = nn.initializers.normal(CODEBOOK_SPREAD), nn.initializers.zeros
            self.predecessor = self.param("predecessor", codebook, (cfg.vocab_size, cfg.rank))
            self.successor = self.param("successor", zeros, (cfg.draft_vocab_size, cfg.rank))
            self.selector_gate = self.param("selector_gate", matrix_init(width), (width, cfg.rank))

    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
        return init_cache(self.config.layer, self.config.num_layers, batch, length, dtype)

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: Cache
    ) -> tuple[DFlash2State, Cache]:
        """Draft the whole block behind the accepted positions, which enter the cache."""
        start, count, size = accepted.start, accepted.count, accepted.next_tokens.shape[1]
        anchor = take_last(accepted.next_tokens[..., None], count)[..., 0]
        slots = self._slots(frozen, anchor)
        # The A accepted positions, then the block, which begins right after the valid ones.
        runs = ((start, size), (start + count, self.config.block.size))
        positions = [first[:, None] + jnp.arange(number) for first, number in runs]

        # A slot sees what is valid of the context, and its whole block.
        is_seen = jnp.arange(size) < count[:, None]
        seen = jnp.pad(is_seen, ((0, 0), (0, slots.shape[1])), constant_values=True)
        own = functools.partial(attend_last, seen=seen, size=slots.shape[1])
        context = self._context(accepted.features)
        u, fresh = self._run(context, slots, jnp.concatenate(positions, 1), own, cache, start)

        # Only the context's keys and values enter the cache; the slots' are dropped.
        rows = jax.tree.map(lambda x: x[:, :, :size], fresh)
        cache = over_rows_and_heads(write_rows, cache, rows, ordered_after(start, u))
        # Slot 0 holds the anchor, which is known. This is the step's one pass over the vocabulary.
        u = u[:, 1:]
        candidates = min(self.config.candidates, self.config.draft_vocab_size)
        best = top_k(head_logits(self.config, frozen, u), candidates)
        # The gates of all P slots at once, since `propose` does not run the trunk.
        gate = u @ self.selector_gate if self.config.rank else u[..., :0]
        return DFlash2State(ids=best.ids, logits=best.values, gate=gate, token=anchor), cache

    def propose(self, frozen: Frozen, state: DFlash2State, depth: int) -> FewTokens:
        """Return the slot's candidates by their scores after each branch's last token."""
        ids, scores = state.ids[:, depth, None], state.logits[:, depth, None]
        if self.config.rank:
            # S = U + <A[a] * G u, B[b]>, of the K candidates alone.
            pair = self._pair(state.token, state.gate[:, depth, None])
            candidates = by_rows(jnp.take(self.successor, ids[:, 0], axis=0))
            scores += jnp.einsum(
                "bwr,bkr->bwk", pair, candidates, preferred_element_type=jnp.float32
            )
        # All K of them, in the order that `FewTokens` promises.
        best, order = jax.lax.top_k(scores, scores.shape[-1])
        ids = jnp.take_along_axis(jnp.broadcast_to(ids, scores.shape), order, axis=-1)
        return FewTokens(ids, jax.nn.log_softmax(best))

    def advance(
        self, frozen: Frozen, state: DFlash2State, cache: Cache, parent: Ids, token: Ids, depth: int
    ) -> DFlash2State:
        """Remember a drafted token: the block is there already."""
        return state.replace(token=token)

    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B M D+r"]:
        """Return [u_k ; A[x_{t+k}] * G u_k] of slot k = i + 1, for a block at every anchor."""
        cfg, size, anchors = self.config, batch.tokens.shape[1], batch.anchors
        if anchors is None:
            # A block behind every t: x_{t+1} is its anchor.
            anchors = jnp.broadcast_to(jnp.arange(1, size + 1), batch.tokens.shape)

        def at_anchors(x: Int[Array, "B S"], further: int = 0) -> Int[Array, "B M"]:
            # Clipped at the row's end, where no pair counts.
            return jnp.take_along_axis(x, jnp.minimum(anchors + further, size - 1), axis=1)

        # A block sees the text of its document before its anchor.
        is_before = jnp.arange(size) < anchors[..., None]
        seen = is_before & (at_anchors(batch.segment_ids)[..., None] == batch.segment_ids[:, None])
        slots = self._slots(frozen, at_anchors(batch.tokens))
        places = at_anchors(batch.positions)[..., None] + jnp.arange(cfg.block.size)
        # Every block stands at its true positions, as it does in decoding.
        positions = jnp.concatenate([batch.positions, places.reshape(len(places), -1)], axis=1)
        own = functools.partial(attend_blocks, seen=seen)
        u, _ = self._run(self._context(features), slots, positions, own)

        # Position by position, with the text's token before each slot.
        blocks = jnp.moveaxis(u.reshape(*anchors.shape, cfg.block.size, -1), 2, 0)[1:]
        if not cfg.rank:
            return blocks
        before = jnp.stack([at_anchors(batch.tokens, k) for k in range(cfg.num_positions)])
        return jnp.concatenate([blocks, self._pair(before, blocks @ self.selector_gate)], axis=-1)

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D+r"], position: int
    ) -> Float[Array, "*b Vd"]:
        width = self.config.layer.hidden_size
        return head_logits(self.config, frozen, hidden[..., :width])

    def rescore(
        self, hidden: Float[Array, "*b D+r"], logits: Float[Array, "*b Vd"]
    ) -> Float[Array, "*b Vd"]:
        """Return S of the K candidates, -inf of all others."""
        pair = project(self.successor, hidden[..., self.config.layer.hidden_size :])
        # Which tokens are among the K has no gradient; their scores have.
        least = kth_largest(jax.lax.stop_gradient(logits), self.config.candidates)
        return jnp.where(logits >= least[..., None], logits + pair, -jnp.inf)

    def _context(self, features: Float[Array, "B A F"]) -> Float[Array, "B A D"]:
        # Split along the features, so that a mesh need not cut one of them.
        split = features.reshape(*features.shape[:-1], len(self.config.features), -1)
        return self.context_norm(contract("bacd,cde->bae", split, self.fc))

    def _slots(self, frozen: Frozen, anchors: Int[Array, "B M"]) -> Float[Array, "B T D"]:
        """Return what the slots of M blocks begin as, block by block."""
        masks = ((0, 0), (0, 0), (0, self.config.num_positions))
        tokens = jnp.pad(anchors[..., None], masks, constant_values=self.config.mask_token_id)
        return embed_input(self.config, frozen, tokens.reshape(len(tokens), -1))

    def _run(
        self,
        context: Float[Array, "B A D"],
        slots: Float[Array, "B T D"],
        positions: Int[Array, "B A+T"],
        attend: Attend,
        cache: Cache | None = None,
        length: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Return u of every slot, and the fresh keys and values of every layer."""
        hidden, fresh = slots, []
        for index, layer in enumerate(self.layers):
            committed = None if cache is None else cache[index]
            hidden, rows = layer(context, hidden, positions, attend, committed, length)
            fresh.append(rows)
        return self.norm(hidden), tuple(fresh)

    def _pair(self, before: Int[Array, "*b"], gate: Float[Array, "*c r"]) -> Float[Array, "*b r"]:
        return by_rows(jnp.take(self.predecessor, before, axis=0, mode="clip")) * gate


def kth_largest(logits: Float[Array, "*b V"], k: int) -> Float[Array, "*b"]:
    """Return the k-th of the different values that come first; -inf where there are fewer."""
    # By maxima: on a mesh `lax.top_k` gathers the logits of all rows.
    return jax.lax.fori_loop(
        0,
        k,
        lambda _, found: jnp.where(logits < found[..., None], logits, -jnp.inf).max(axis=-1),
        jnp.full(logits.shape[:-1], jnp.inf),
    )


def feature_layers(num_layers: int, count: int) -> tuple[str, ...]:
    """Return `count` base states, spread from the second layer's to that of the last but two.

    A base of fewer than 5 layers has no such range: there from the first layer to the last.

    Example: of 8 layers, 3 are layer_2, layer_4, layer_6, the outputs of layers 1, 3 and 5.
    """
    first, last = (1, num_layers - 3) if num_layers >= 5 else (0, num_layers - 1)
    if count == 1:
        return (output_of(num_layers // 2, num_layers),)
    layers = np.linspace(first, last, count).round().astype(int).tolist()
    return tuple(output_of(layer, num_layers) for layer in layers)


def output_of(layer: int, num_layers: int) -> str:
    """Return the name of the state that a layer gives; the first one is layer 0."""
    return "pre_norm" if layer == num_layers - 1 else f"layer_{layer + 1}"


def method_loss(block_size: int, rank: int) -> LossSpec:
    """Return the method's loss; gamma 7, 5 and 4 are published for blocks of 16, 10 and 8."""
    # Half of the block, 7 at most: this gives the three published values.
    gamma = min(block_size / 2, 7)
    decay = math.exp(-1 / gamma)
    return LossSpec(
        hard_ce=1.0,
        candidate_ce=1.0 if rank else 0.0,
        decay=decay,
        divisor="weights",
        divisor_offset=1e-5,
    )


def make_config(
    base: BaseConfig,
    num_positions: int = 7,
    num_layers: int | None = None,
    num_features: int | None = None,
    mask_token_id: int | None = None,
    rank: int | None = None,
    conv_group: int | None = None,
    rope: RopeConfig | None = None,
    loss: LossSpec | None = None,
    **options: Any,
) -> DFlash2Config:
    """Return the head's config for a base.

    num_layers: 5, or as many as the base has where these are fewer; num_features: as many.
    mask_token_id: the last row of the embedding, which most vocabularies do not use.
    rank, conv_group: 256 and 16, or what fits a narrow base.
    """
    # Qwen3's kind of layer, whatever the base's is, as in the published heads.
    layer = layer_for(base, rope, llama_layer=True)
    count = min(5, base.num_layers) if num_layers is None else num_layers
    rank = min(DEFAULT_RANK, base.hidden_size // 2) if rank is None else rank

    return DFlash2Config(
        layer=dataclasses.replace(layer, query_key_norm=True),
        vocab_size=base.vocab_size,
        num_positions=num_positions,
        max_depth=num_positions,
        features=feature_layers(base.num_layers, count if num_features is None else num_features),
        mask_token_id=base.vocab_size - 1 if mask_token_id is None else mask_token_id,
        num_layers=count,
        rank=rank,
        conv_group=math.gcd(16, base.hidden_size) if conv_group is None else conv_group,
        loss=loss or method_loss(num_positions + 1, rank),
        **options,
    )


def init_from_base(
    config: DFlash2Config, params: Params, base_params: Params, rng: Array
) -> Params:
    """All of it starts as it was made; training fits `linear_params` to its first batch."""
    return {}
