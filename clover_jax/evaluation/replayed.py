"""Decoding without a base: a written answer determines what every forward would accept.

The stages are the engine's own but for verification: the text's next token is taken for the base's
choice after every slot. So accepted lengths are those of a base that writes this very answer, for
drafts that read nothing but tokens.

The base's choice after a refused node is not known. A draft that learns from it, as recycle does,
learns here from the text alone and does somewhat worse than it would in decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import FLOAT32, Array, Int
from clover_jax.decoding.accept import accept_path
from clover_jax.decoding.prefill import absorb_prompt
from clover_jax.decoding.programs import recorded_steps
from clover_jax.decoding.state import LENGTH, RUNNING, DecodeState, bucket, empty_state
from clover_jax.decoding.step import (
    StepConfig,
    StepRecord,
    Weights,
    absorb_and_draft,
    commit,
    roots,
)
from clover_jax.decoding.tree import TreeWithCopies, count_copies
from clover_jax.runtime.progress import Progress

_POSITIONS_AT_ONCE = 16384  # rows of a batch x their length
_PROMPT_CHUNK = 64  # positions of prompts that the draft absorbs at once
_NO_TOKEN = -2  # after the end of a text; PAD_TOKEN stands in a tree's empty slots


class Written(NamedTuple):
    """A written answer, with all the text before it."""

    kind: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


def replay_rows(
    answers: Sequence[Written], config: StepConfig, bar: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Yield an output row, as `Tally` reads it, for every answer; those of one length together.

    config: of a draft that reads tokens only. Its base has no layers.
    """
    depth = config.tree.depth
    by_size: dict[int, list[Written]] = {}
    for answer in answers:
        # Steps look and write a tree's depth beyond the end.
        size = bucket(len(answer.prompt_ids) + len(answer.output_ids) + depth + 1)
        by_size.setdefault(size, []).append(answer)

    for size, group in by_size.items():
        # A batch lasts as long as its longest answer, so equally long ones stand together.
        group.sort(key=lambda answer: len(answer.output_ids))
        rows = max(1, _POSITIONS_AT_ONCE // size)
        for start in range(0, len(group), rows):
            chosen = group[start : start + rows]
            record = jax.device_get(_replay(config, *_pack(chosen, rows, size)))
            for row, answer in enumerate(chosen):
                yield _output_row(answer, row, record)
            if bar is not None:
                bar.update(len(chosen))


def _pack(
    answers: Sequence[Written], rows: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return texts, one a row, where the answers' first tokens lie, and where the texts end."""
    # Rows without an answer begin and end at 0, so they never run.
    text = np.full((rows, size), _NO_TOKEN, np.int32)
    first, end = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row, answer in enumerate(answers):
        whole = [*answer.prompt_ids, *answer.output_ids]
        text[row, : len(whole)] = whole
        first[row], end[row] = len(answer.prompt_ids), len(whole)
    return text, first, end


def _output_row(answer: Written, row: int, record: StepRecord) -> dict[str, Any]:
    # Steps after a row's end have emitted nothing.
    count = int((record.emitted[:, row] > 0).sum())
    accepted = record.accepted[:count, row].tolist()
    ranks = record.ranks[:count, row].tolist()
    return {
        "kind": answer.kind,
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.output_ids,
        "accepted": accepted,
        "proposed": record.proposed[:count, row].tolist(),
        # Ranks of accepted tokens alone; the record has room for a whole path.
        "ranks": [path[:length] for path, length in zip(ranks, accepted, strict=True)],
        "num_cut": 0,
        "finish_reason": "length",
    }


@functools.partial(jax.jit, static_argnums=0)
def _replay(
    config: StepConfig, text: Int[Array, "B S"], first: Int[Array, " B"], end: Int[Array, " B"]
) -> StepRecord:
    """Return what every step did, with a leading [S]; rows without an answer have first = end.

    first: index of each answer's first token, which prefill gives. end: of the text. The buffers
    are tree.depth + 1 positions longer, filled with tokens that equal no other.
    """
    state, step = _begin(config, text, first, end), functools.partial(_step, config, text)
    _, record = jax.eval_shape(step, state)
    # Every step of a running row emits a token, so there are never more than positions.
    steps = text.shape[1]
    records = jax.tree.map(lambda one: jnp.zeros((steps, *one.shape), one.dtype), record)

    def goes_on(_: Array, state: DecodeState) -> Array:
        return (state.finish == RUNNING).any()

    return recorded_steps(step, goes_on, state, records)[1]


def _begin(
    config: StepConfig, text: Int[Array, "B S"], first: Int[Array, " B"], end: Int[Array, " B"]
) -> DecodeState:
    """Return the state after prefill: the prompts are read, and each row's first token is out."""
    rows, size = text.shape
    places = jnp.arange(size)
    state = empty_state(config.base, config.head, config.tree, rows, size, 1, FLOAT32)
    prompts = jnp.where(places < first[:, None], text, 0)
    state = state.replace(tokens=prompts, end=first)

    # A base without layers has activations of width 0.
    features = jnp.zeros((rows, _PROMPT_CHUNK, 0))
    state = jax.lax.fori_loop(
        0,
        -(-first.max() // _PROMPT_CHUNK),
        lambda chunk, state: absorb_prompt(
            config, _no_weights(), state, features, chunk * _PROMPT_CHUNK
        ),
        state,
    )

    # The first token is the root: no step has read it.
    root = jnp.take_along_axis(text, first[:, None], axis=1)
    return state.replace(
        tokens=jnp.where(places == first[:, None], root, prompts),
        length=first,
        end=first + 1,
        limit=end,
        finish=jnp.where(first + 1 < end, RUNNING, LENGTH),
        next_tokens=jnp.broadcast_to(root, state.next_tokens.shape),
        count=jnp.ones_like(first),
    )


def _step(
    config: StepConfig, text: Int[Array, "B S"], state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Advance every running row as `speculate_and_verify` does, with the text for the base."""
    state, drafted = absorb_and_draft(config, _no_weights(), state, roots(state))
    tree = drafted.tree

    # A node is right where its token is the text's at its depth.
    ahead = state.end[:, None] + jnp.arange(tree.depth + 1)
    following = jnp.take_along_axis(text, jnp.minimum(ahead, text.shape[1] - 1), axis=1)
    # After a slot at depth `level` the base would give the text's token `level` places further.
    level = jnp.broadcast_to(tree.level(), tree.tokens.shape)
    choices = jnp.take_along_axis(following, level, axis=1)

    features = jnp.zeros((*tree.tokens.shape, 0))
    state, record = commit(state, tree, accept_path(tree, choices), (), features)
    # Trees with copies learn from their own success, as in `speculate_and_verify`.
    if isinstance(drafted, TreeWithCopies) and state.copies is not None:
        counted = count_copies(state.copies, drafted.best, state.next_tokens, state.count)
        state = state.replace(copies=counted)
    return state, record


def _no_weights() -> Weights:
    """Return a base's matrices of size 0: the stages pass them on, and nothing reads them."""
    return Weights({"embedding": jnp.zeros((0, 0)), "final_norm": {"scale": jnp.zeros(0)}}, {})
