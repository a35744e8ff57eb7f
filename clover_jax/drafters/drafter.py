"""The contract of a drafter: the interface through which engine and trainer use a draft head.

The base is the target model. A drafter is a linen module with these methods, next to a frozen
config (`DrafterConfig`). The base's matrices are passed in as `Frozen`, never copied into the
head's params. Indexing: the base has read x_0 .. x_t; its features at t, paired with x_{t+1}, let
position i of the head propose x_{t+2+i}.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig, RopeConfig
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project
from clover_jax.models.int8 import Matrix, take_rows

DRAFT_ROWS = "draft_lm_head"  # leaf next to the base's params
PAD_TOKEN = -1  # never equals a token, so a padding slot is never accepted
State = Any  # a pytree of the drafter's own; leaves [B, W, ...], or what all branches share
Ids = Int[Array, "B W"]  # a number for each of W branches
DraftCache = Any  # likewise; leaves [B, ...], of which a `KeyValue`'s grow with the text


class Frozen(struct.PyTreeNode):
    """The base's matrices that a head may read.

    lm_head:    [V, D] output matrix; its rows also serve Clover as token embeddings.
    embedding:  [V, D] input embedding (the same array as lm_head when they are tied).
    final_norm: [D]    scale of the base's final RMSNorm.
    draft_lm_head: [Vd, D] lm_head for heads: a quantized copy (`--int8=draft`), or the rows of a
        reduced vocabulary, gathered once by `with_draft_rows`; None where heads use lm_head.
    """

    lm_head: Matrix
    embedding: Float[Array, "V D"]
    final_norm: Float[Array, " D"]
    draft_lm_head: Matrix | None = None


class AcceptedPositions(struct.PyTreeNode):
    """Positions that the base has accepted and the head has not read yet.

    The first count[b] of A positions of a row are valid, the rest is ignored.

    features:    [B, A, F] the base's activations at each position.
    next_tokens: [B, A]    the token that follows it.
    start:       [B]       where the first one lies in the text.
    count:       [B]       valid positions.
    text:        [B, S]    what may be copied: the row's tokens up to start + count, PAD_TOKEN
        beyond, and what the row brought with it (`text_matches.known_text`).
    """

    features: Float[Array, "B A F"]
    next_tokens: Int[Array, "B A"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]
    text: Int[Array, "B S"]


class FewTokens(struct.PyTreeNode):
    """A sparse proposal: top-k ids and log probabilities; all other tokens have probability 0.

    ids:             [B, W, k] the most probable first; PAD_TOKEN where there are fewer.
    log_probability: [B, W, k] -inf where there is none; their sum may be below 1.
    """

    ids: Int[Array, "B W k"]
    log_probability: Float[Array, "B W k"]


Proposal = Float[Array, "B W Vd"] | FewTokens


class Drafter(nn.Module):
    """The base class of draft heads; `DraftHead.apply` calls its methods.

    A head defines the methods, but for `observe` and `rescore`; `init_cache`, `logits` and the
    properties below where its own differ. A head without weights is never trained: it needs no
    `train_forward`.
    """

    config: DrafterConfig

    @property
    def output_params(self) -> tuple[str, ...]:
        """Names of the params that `logits` or `rescore` reads, one leaf a position."""
        return ()

    @property
    def scale_params(self) -> tuple[str, ...]:
        """Names of the params that scale a fresh head's logits: twice as large, twice the logits.

        Training scales them once, before its first step (`training.step.fit_start`).
        """
        return ()

    @property
    def linear_params(self) -> tuple[str, ...]:
        """Names of the small params in which a head's logits are linear, all together.

        For a head whose layers begin at random. Training fits their values before its first step
        (`training.step.fit_start`).
        """
        return ()

    @property
    def reads_lm_head(self) -> bool:
        """Whether decoding needs the rows of lm_head for this head."""
        return True

    @property
    def num_anchors(self) -> int:
        """Places of a row, at most, at which a training step trains; 0 for all positions."""
        return 0

    @property
    def observes(self) -> bool:
        """Whether the head has `observe`, and so learns while it decodes."""
        return False

    @property
    def rescores(self) -> bool:
        """Whether the head has `rescore`, and so proposes a few of its logits' tokens."""
        return False

    # What decoding calls: a cache once, `absorb` in each step, then level by level `propose` and
    # `advance`.
    def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> DraftCache:
        """Return an empty draft cache: the head's KV cache, other state of the text, or ()."""
        return ()

    def absorb(
        self, frozen: Frozen, accepted: AcceptedPositions, cache: DraftCache
    ) -> tuple[State, DraftCache]:
        """Update the draft cache with accepted positions; return the state at each row's last one.

        cache: holds start[b] committed positions; the result holds start[b] + count[b].
        Returns the root state, that of a single branch, and the cache.
        """
        raise NotImplementedError

    def propose(self, frozen: Frozen, state: State, depth: int) -> Proposal:
        """Return the logits of the tokens that may follow each state, `depth` levels down.

        [B, 1, Vd] where they are the same for all branches; or `FewTokens`.
        """
        raise NotImplementedError

    def advance(
        self, frozen: Frozen, state: State, cache: DraftCache, parent: Ids, token: Ids, depth: int
    ) -> State:
        """Go one level down: follow `token` from state `parent` of the level above.

        depth: level of the new states, 1 for the root's children. The committed cache is
            read-only here; a head with attention keeps its tree's keys and values in the state.
        """
        raise NotImplementedError

    def observe(
        self,
        cache: DraftCache,
        tokens: Int[Array, "B T"],
        choices: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> DraftCache:
        """Update the draft cache with a verified tree, whether it was accepted or not.

        choices: the base's most probable token after each slot. valid: slots that hold a token, of
            rows that run; the others must change nothing.
        """
        raise NotImplementedError

    # What training calls; `logits` serves decoding as well.
    def train_forward(
        self, frozen: Frozen, features: Float[Array, "B S F"], batch: Batch, rng: Array | None
    ) -> Float[Array, "P B S D"]:
        """Return hidden[i, b, t], from which position i proposes x_{t+2+i}, teacher forced.

        A head with `num_anchors` returns [P, B, M, D] for the places `batch.anchors` alone; without
        them it returns all t.
        """
        raise NotImplementedError

    def logits(
        self, frozen: Frozen, hidden: Float[Array, "*b D"], position: int
    ) -> Float[Array, "*b Vd"]:
        """Map `train_forward`'s hidden states of one position to logits, by the frozen matrix."""
        return head_logits(self.config, frozen, hidden)

    def rescore(
        self, hidden: Float[Array, "*b D"], logits: Float[Array, "*b Vd"]
    ) -> Float[Array, "*b Vd"]:
        """Return the scores by which the head proposes its few tokens, -inf for all others."""
        raise NotImplementedError


def layer_for(base: BaseConfig, rope: RopeConfig | None, llama_layer: bool = False) -> LayerConfig:
    """Return the shape of a head's layer: that of the base's layers.

    rope: in place of the base's.
    llama_layer: without what Llama's layers do not have, which the readers of other programs do
        not expect.
    """
    # A head attends over the same text as the base, so it takes its rotary base.
    layer = dataclasses.replace(base.head_layer, rope=rope or base.rope)
    return layer.as_llama() if llama_layer else layer


def check_max_depth(config: DrafterConfig, reason: str) -> None:
    """Raise ValueError unless the head drafts as deep as its positions; reason: why it must."""
    if config.max_depth != config.num_positions:
        raise ValueError(
            f"max_depth ({config.max_depth}) must be num_positions ({config.num_positions}): "
            f"{reason}"
        )


def frozen_from_base(base_params: Params) -> Frozen:
    """Collect what heads read from the base's params, without a copy.

    base_params: of the base, or what `with_draft_rows` made of them.
    """
    # A tied base has one matrix for both.
    embedding = base_params["embedding"]
    return Frozen(
        lm_head=base_params.get("lm_head", embedding),
        embedding=embedding,
        final_norm=base_params["final_norm"]["scale"],
        draft_lm_head=base_params.get(DRAFT_ROWS),
    )


def with_draft_rows(base_params: Params, config: DrafterConfig) -> Params:
    """Return the base's params and, for a reduced vocabulary, its rows of lm_head too.

    Steps get these: within a step the rows would be gathered again each time, which costs more
    than the smaller matrix saves.
    """
    # A quantized copy of the whole lm_head may lie there already; the rows are then its own.
    frozen = frozen_from_base(base_params)
    given = frozen.draft_lm_head
    is_done = given is not None and given.shape[0] == config.draft_vocab_size
    # A whole vocabulary needs no rows of its own.
    if config.draft_to_target is None or is_done:
        return base_params
    matrix = frozen.lm_head if given is None else given
    return {**base_params, DRAFT_ROWS: take_rows(matrix, jnp.asarray(config.draft_to_target))}


def output_matrix(config: DrafterConfig, frozen: Frozen) -> Matrix:
    """Return the frozen matrix, [Vd, D], that a head's outputs are multiplied with.

    Raises ValueError for a reduced vocabulary whose rows were not gathered.
    """
    # Without a reduced vocabulary a copy there is the quantized lm_head.
    rows = frozen.draft_lm_head
    if config.draft_to_target is None:
        return frozen.lm_head if rows is None else rows
    if rows is None or rows.shape[0] != config.draft_vocab_size:
        raise ValueError(
            "the head has a reduced vocabulary: hand with_draft_rows(base_params, config) to the "
            "step instead of base_params"
        )
    return rows


def head_logits(
    config: DrafterConfig, frozen: Frozen, hidden: Float[Array, "*b D"]
) -> Float[Array, "*b Vd"]:
    """Return the logits of a head's outputs by the frozen matrix, within the base's soft cap."""
    # The cap is the base's: a head imitates its capped logits.
    return project(output_matrix(config, frozen), hidden, config.logit_cap)


def select_features(hidden: dict[str, Array], names: tuple[str, ...]) -> Float[Array, "B T F"]:
    """Concatenate the named base activations on the last axis."""
    return jnp.concatenate([hidden[name] for name in names], axis=-1)
