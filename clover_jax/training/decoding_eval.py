"""Measure a head in training by real speculative decoding of held-out prompts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Params
from clover_jax.checkpoints.base import BaseModel
from clover_jax.data.chat import encode_prompt
from clover_jax.data.prompts import SHIPPED_PROMPTS, read_prompts
from clover_jax.data.records import Record, json_hash
from clover_jax.data.samples import Reading, RecordSamples
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import AcceptedLengths, Generation, Request
from clover_jax.decoding.tree_config import Tree, TreeConfig, portable_name
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.runtime.dtypes import exact_matmuls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# First tokens taken of a held-out record with too short a prompt, where no prompts are given.
OPENING_TOKENS = 32
SHORTEST_PROMPT = 8
BATCH_SIZE = 8  # prompts decoded at once


class Interrupted(Exception):
    """The run was asked to stop while prompts were decoded."""


class NoPromptFits(UserError):
    """No prompt fits the base's context."""


class DecodingEvaluator:
    """Decodes the same prompts at every measurement; the plain outputs are computed once."""

    def __init__(
        self,
        base: BaseModel,
        head: DraftHead,
        tree: Tree,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        mesh: Mesh | None,
    ):
        """Take encoded prompts; raises UserError where the tree does not suit the head.

        mesh: the devices that hold the base and the heads; None: a single one.
        """
        self._base, self._prompts, self._max_new_tokens = base, prompts, max_new_tokens
        # A slot without a row is computed too.
        batch_size = min(BATCH_SIZE, len(prompts))
        options: dict[str, Any] = {"batch_size": batch_size, "mesh": mesh}
        # Both engines have as many slots: in low precision a text may depend on its batch.
        self._engine = Engine(base.config, head, tree, **options)
        self._plain = Engine(base.config, None, TreeConfig.root_only(), **options)
        self._depth = tree.depth
        self._measured_with = {
            "tree": portable_name(tree),
            "prompts_hash": json_hash(prompts),
            "max_new_tokens": max_new_tokens,
        }
        self._plain_outputs: list[list[int]] | None = None

    def measure(self, params: Params, stop: threading.Event) -> dict[str, Any]:
        """Decode every prompt with the head's params; return the row of eval.jsonl but its step.

        tau: emitted tokens per target forward, bonus included, without prefill's token and forward.
        hit_rate: joint by position: share of forwards whose positions 0..i were all accepted.
        equal, prompts: outputs equal to plain decoding token for token, of how many.
        tokens, forwards: the sums behind tau. measured_with: only taus with equal values compare.
        Raises Interrupted when `stop` is set meanwhile.
        """
        # As a user will decode: in the base's dtype, not in the optimizer's.
        dtype = self._base.dtype
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        # Equality is promised in float32, which accelerators multiply less exactly by default.
        with exact_matmuls(str(dtype)):
            if self._plain_outputs is None:
                plain = self._decode(self._plain, None, stop)
                self._plain_outputs = [row.output_ids for row in plain]
            rows = self._decode(self._engine, params, stop)

        pairs = zip(rows, self._plain_outputs, strict=True)
        lengths = AcceptedLengths()
        for row in rows:
            lengths.add(len(row.output_ids), row.accepted)
        return {
            "tau": lengths.tau or 0.0,
            "hit_rate": lengths.hit_rate(self._depth) or [0.0] * self._depth,
            "equal": sum(row.output_ids == plain for row, plain in pairs),
            "prompts": len(rows),
            "tokens": lengths.tokens - len(rows),  # prefill gave the first of each
            "forwards": lengths.forwards,
            "measured_with": self._measured_with,
        }

    def _decode(
        self, engine: Engine, params: Params | None, stop: threading.Event
    ) -> list[Generation]:
        eos = self._base.config.eos_token_ids
        requests = [Request(i, p, self._max_new_tokens, eos) for i, p in enumerate(self._prompts)]
        rows = []
        for progress in engine.stream(self._base.params, params, requests):
            # Decoding may take minutes, in which a user would wait for the stop.
            if stop.is_set():
                raise Interrupted
            if progress.done:
                rows.append(progress.row)
        # Rows end in any order, and are compared with plain decoding's rows one by one.
        return sorted(rows, key=lambda row: row.index)


def evaluation_prompts(
    path: str | None,
    heldout: Sequence[Record],
    base: BaseModel,
    tokenizer: PreTrainedTokenizerBase | None,
    count: int,
) -> list[list[int]]:
    """Return up to `count` prompts as token ids.

    path: a prompts file; None takes prompts.jsonl of the base's folder, or where there is none
        the beginnings of held-out records: what comes before the answer, or the first tokens
        where that is shorter than a real prompt; each once.
    Raises NoPromptFits where no prompt fits the base's context.
    """
    vocab_size = base.config.vocab_size
    own = base.directory / SHIPPED_PROMPTS
    if path is not None or own.is_file():
        source = str(Path(path).expanduser() if path is not None else own)
        rows = read_prompts(source)[:count]
        prompts = [encode_prompt(row, tokenizer, vocab_size) for row in rows]
    else:
        source = "the held-out part of --data"
        # Not cut to a row, and empty where its record is refused, as in training.
        samples = RecordSamples(heldout, Reading(tokenizer, vocab_size, sys.maxsize))
        # Distinct prompts only. Samples are tokenized one by one, until there are enough.
        openings: dict[tuple[int, ...], None] = {}
        for index in range(len(samples)):
            tokens, mask = samples[index]
            # The prompt is everything before the first token that the head learns to draft.
            size = int(np.argmax(mask)) if mask.any() else 0
            if size < SHORTEST_PROMPT:
                size = min(OPENING_TOKENS, len(tokens) // 2)
            openings.setdefault(tuple(tokens[:size].tolist()))
            if len(openings) == count:
                break
        prompts = [list(opening) for opening in openings]

    # A prompt that is too long is left out rather than refused: the others still measure.
    longest = base.config.max_position_embeddings // 2  # the other half is for the answer
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= longest]
    if not fitting:
        raise NoPromptFits(
            f"{source} has no prompt of 1 to {longest} tokens; pass --eval_prompts=FILE, or "
            "--eval_every=0 to train without evaluation"
        )
    return fitting
