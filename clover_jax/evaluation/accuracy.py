"""Top-k accuracy by position, teacher-forced on the text that plain decoding emitted.

Position i of the head at text position t proposes x_{t+2+i}. A pair (t, i) counts when decoding
could have made it: both x_{t+1} and x_{t+2+i} are emitted tokens. It is a top-k hit when the
base's own argmax there is among the head's k most probable tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Array, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.state import bucket
from clover_jax.decoding.step import weights_for
from clover_jax.decoding.tree import target_ids
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.drafters.registry import DraftHead
from clover_jax.evaluation.plan import Method
from clover_jax.evaluation.rows import TurnRow
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project
from clover_jax.models.placement import gathered_in_use
from clover_jax.models.top_k import argmax, top_k
from clover_jax.training.teacher import teach

TOP = (1, 3, 5)
_POSITIONS_AT_ONCE = 2048  # rows of a batch x their length
_TARGETS_AT_ONCE = 128  # whose logits exist at a time


class Hits(NamedTuple):
    """Counts over one turn or several.

    pairs: [P] pairs that count. hits: [3, P] pairs whose target is among the TOP best tokens.
    """

    pairs: np.ndarray
    hits: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        shares = np.where(self.pairs > 0, self.hits / np.maximum(self.pairs, 1), np.nan)
        return {
            "pairs": self.pairs.tolist(),
            **{f"top_{k}": shares[i].tolist() for i, k in enumerate(TOP)},
        }


def measure(method: Method, turns: Sequence[TurnRow]) -> Iterator[tuple[int, Hits]]:
    """Yield the number of each turn and its hits; turns of one length share batches."""
    base, head = method.models.base, method.models.head
    assert head is not None  # plain decoding proposes nothing
    weights = weights_for(head, base.params, method.models.draft_params)
    placement = Placement(method.models.mesh)

    # One number of targets for all batches, or every longest answer would be another program.
    longest = max((len(turn.output_ids) for turn in turns), default=1)
    num_targets = -(-longest // _TARGETS_AT_ONCE) * _TARGETS_AT_ONCE

    # Turns by the size of their buffer, since the program is compiled for each size.
    by_size: dict[int, list[int]] = {}
    for number, turn in enumerate(turns):
        size = bucket(len(turn.prompt_ids) + len(turn.output_ids))
        by_size.setdefault(size, []).append(number)

    for size, numbers in by_size.items():
        # Every batch of a length has as many rows, so its program compiles once.
        rows = placement.whole_rows(max(1, _POSITIONS_AT_ONCE // size))
        for start in range(0, len(numbers), rows):
            group = numbers[start : start + rows]
            batch, first, end = _pack([turns[number] for number in group], rows, size)
            arguments = (weights.base, weights.draft, batch, first, end, np.zeros(num_targets))
            with placement.in_use():
                counted = count_hits(base.config, head, placement.mesh, *arguments)
            pairs, hits = placement.read(counted)
            for row, number in enumerate(group):
                yield number, Hits(pairs[row], hits[row])


def total(parts: Sequence[Hits]) -> Hits:
    """Add up the counts of several turns."""
    return Hits(*(np.sum(counts, axis=0) for counts in zip(*parts, strict=True)))


def _pack(turns: Sequence[TurnRow], rows: int, size: int) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Return a batch with a turn a row, where its emitted tokens begin, and where it ends."""
    # Empty rows of the last batch end before they begin, so they have no pair.
    tokens = np.zeros((rows, size), np.int32)
    first, end = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    for row, turn in enumerate(turns):
        ids = [*turn.prompt_ids, *turn.output_ids]
        tokens[row, : len(ids)] = ids
        first[row], end[row] = len(turn.prompt_ids), len(ids)
    slots = np.broadcast_to(np.arange(size, dtype=np.int32), tokens.shape)
    # One document in each row (1), then padding (0).
    segments = (slots < end[:, None]).astype(np.int32)
    fields: tuple[Any, ...] = (tokens, segments, slots, segments > 0)
    return Batch(*fields), first, end


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def count_hits(
    base: BaseConfig,
    head: DraftHead,
    mesh: Mesh | None,
    base_params: Params,
    params: Params,
    batch: Batch,
    first: Int[Array, " B"],
    end: Int[Array, " B"],
    slots: Array,
) -> tuple[Int[Array, "B P"], Int[Array, "B K P"]]:
    """Return the counted pairs and the hits of every row of a batch.

    mesh: over which params are split, and rows evenly.
    first, end: where a row's emitted tokens begin and where it ends. slots: [n], at least as long
        as a row's emitted tokens; only its length is used.
    """
    teacher = teach(base, base_params, head.config.features, batch, mesh)
    base_params, params = gathered_in_use((base_params, params))
    frozen = frozen_from_base(base_params)
    hidden = head.apply(params, "train_forward", frozen, teacher.features, batch, None)

    # Target index s = t + 1 + i: the base's state there gives the token at s + 1.
    target = first[:, None] + jnp.arange(slots.shape[0])
    wanted = _in_chunks(
        lambda states: argmax(project(frozen.lm_head, states)), _rows(teacher.states, target)
    )

    pairs, hits = [], []

    def best_ids(u: Array, i: int) -> Array:
        scores = head.rescored(params, u, head.apply(params, "logits", frozen, u, i))
        return target_ids(head, top_k(scores, max(TOP)).ids)

    for i in range(hidden.shape[0]):
        source = target - 1 - i
        # The source may be the prompt's last token; its target must be emitted.
        counts = (source + 1 >= first[:, None]) & (target + 1 < end[:, None])
        ids = _in_chunks(functools.partial(best_ids, i=i), _rows(hidden[i], source))
        # Only the token that decoding takes is a hit, not another one with an equal logit.
        is_hit = (ids == wanted[..., None]) & counts[..., None]
        pairs.append(counts.sum(axis=1))
        hits.append(jnp.stack([is_hit[..., :k].any(-1).sum(axis=1) for k in TOP], axis=1))
    return jnp.stack(pairs, axis=-1), jnp.stack(hits, axis=-1)


def _rows(x: Array, index: Int[Array, "B n"]) -> Array:
    """Take [B, n, D] of [B, S, D]; an index outside takes some row."""
    return jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[1] - 1)[..., None], axis=1)


def _in_chunks(function: Any, x: Array) -> Array:
    """Apply a function of [n, D] to [B, n, D], a chunk of targets at a time."""
    # Logits of all targets at once would be the largest array of the run.
    chunks = x.reshape(-1, _TARGETS_AT_ONCE, x.shape[-1])
    result = jax.lax.map(function, chunks)
    return result.reshape(*x.shape[:2], *result.shape[2:])
