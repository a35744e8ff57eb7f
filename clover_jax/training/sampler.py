"""Rollouts: sampled completions of a base that changes, with what a learner needs of them.

The text is the current base's, whatever the draft: `update_base` swaps params between two calls,
and compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.quantization import quantize_base
from clover_jax.data.chat import encode_prompt
from clover_jax.data.prompts import Prompt
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import AcceptedLengths, Generation, Request
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.errors import UserError
from clover_jax.models.meshes import mesh_for
from clover_jax.models.placement import param_shardings
from clover_jax.runtime.dtypes import exact_matmuls
from clover_jax.training.adapting import Adapter


class Samples(NamedTuple):
    """N = prompts x n completions, prompt by prompt; L = `max_new_tokens`.

    Arrays of NumPy, of the same shapes in every call with as many prompts, so that a jitted learner
    compiles once.

    tokens:         [N, L] the completions, an EOS token included; 0 behind their ends.
    mask:           [N, L] which tokens are of the completion.
    logprobs:       [N, L] the base's log-probability of each token at the sampling temperature,
        before top-k and top-p; 0 at temperature 0, and where `mask` is unset.
    base_logprobs:  [N, L] the same at temperature 1.
    lengths:        [N] tokens of each completion.
    finish_reasons: "eos" or "length", of each.
    prompt_ids:     the prompts' tokens, of each completion.
    tau:            tokens emitted per forward of the base, without the first of each completion,
        which comes from reading the prompt; None where no completion has a second.
    """

    tokens: Int[np.ndarray, "N L"]
    mask: Bool[np.ndarray, "N L"]
    logprobs: Float[np.ndarray, "N L"]
    base_logprobs: Float[np.ndarray, "N L"]
    lengths: Int[np.ndarray, " N"]
    finish_reasons: list[str]
    prompt_ids: list[list[int]]
    tau: float | None


class Sampler:
    """Samples completions of prompts, `batch_size` at once. Not safe for several threads.

    models: of the next call of `sample`. adapter: what trains their head, or None.
    """

    def __init__(
        self,
        models: Models,
        *,
        batch_size: int = 8,
        mesh: Mesh | str | None = None,
        adapt: bool = False,
        adapt_every: int | None = None,
    ):
        """Take the models; nothing compiles before the first call of `sample`.

        mesh: the devices to decode on: a mesh with our axes, such as a learner's, or its text, as
            "data=2"; None is where the models lie.
        adapt: train the head on its samples, so that it keeps up with the base, for at most 5 % of
            the seconds of decoding.
        adapt_every: forwards of the base between two such steps, whatever they take: for runs that
            must be repeated to the bit.
        """
        if mesh is not None:
            models = dataclasses.replace(
                models, mesh=mesh_for(mesh) if isinstance(mesh, str) else mesh
            )
            models = dataclasses.replace(models, base=_placed(models, models.base.params))
        self.models = models
        self._batch_size = batch_size
        self.adapter = Adapter(models, adapt_every) if adapt else None

    def update_base(self, params: Params) -> None:
        """Decode with these params of the base from now on.

        params: as `models.base.params`: same names, shapes and types. Arrays that lie where the
            base's lie are taken as they are, not copied: a learner that donates them to its next
            step calls this again after it. Matrices are quantized again where the models' are.
        Raises UserError that names the first param that differs.
        """
        models, base = self.models, self.models.base
        if models.int8:
            params = jax.jit(quantize_base, static_argnames="parts")(params, parts=models.int8)
        wanted = dict(jax.tree_util.tree_leaves_with_path(base.params))
        given = dict(jax.tree_util.tree_leaves_with_path(params))
        for path in [*wanted, *given]:
            old, new = (_kind(leaves.get(path)) for leaves in (wanted, given))
            if old != new:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise UserError(f"param {name} of the base is {old}, and the new one is {new}")
        # Caches are made in each call of `sample`, so none of an older base is ever read.
        self.models = dataclasses.replace(models, base=_placed(models, params))

    def sample(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        n: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Samples:
        """Return `n` completions of each prompt; a prompt is read once for all of them.

        prompts: texts or token ids. seed: another one for each call; completion i draws from the
            stream of (seed, i), whatever is decoded with it.
        Raises UserError for a prompt that does not fit the context.
        """
        params = SamplingParams(float(temperature), int(top_k), float(top_p))
        if n < 1:
            raise UserError(f"n ({n}) must be at least 1")
        requests = self._requests(prompts, n, max_new_tokens, params)
        rules = SamplingConfig("lossless", draft_sampling="auto", truncate=params.cuts, scored=True)
        # Engines of one sampler share their programs, whatever their seeds.
        engine = self.models.engine(self._batch_size, rules, seed=int(seed), adapts=True)
        for request in requests:
            engine.check(request)

        base, draft = self.models.base.params, self.models.draft_params or {}
        if self.adapter is not None:
            draft = self.adapter.params  # after `restore`, another than the models'
        with exact_matmuls(str(self.models.dtype)):
            updates = engine.stream(base, draft, requests, self.adapter)
            rows = [update.row for update in updates if update.done]
        if self.adapter is not None and self.models.draft is not None:
            learned = dataclasses.replace(self.models.draft, params=self.adapter.params)
            self.models = dataclasses.replace(self.models, draft=learned)
        return _gather(sorted(rows, key=lambda row: row.index), max_new_tokens)

    def _requests(
        self, prompts: Iterable[str | Sequence[int]], n: int, length: int, params: SamplingParams
    ) -> list[Request]:
        base, requests = self.models.base.config, list[Request]()
        for index, given in enumerate(prompts):
            prompt = Prompt(index, f"prompt {index}")
            if isinstance(given, str):
                prompt = dataclasses.replace(prompt, text=given)
            else:
                prompt = dataclasses.replace(prompt, prompt_ids=tuple(np.asarray(given).tolist()))
            ids = encode_prompt(prompt, self.models.tokenizer, base.vocab_size)

            # The others of a group take the KV cache that the first one's prompt left in its row.
            place, eos = len(requests), base.eos_token_ids
            first = Request(place, ids, length, eos, params, wants_scores=True)
            others = range(place + 1, place + n)
            requests.append(first)
            requests += [dataclasses.replace(first, index=i, shares_prompt=True) for i in others]
        return requests


def _placed(models: Models, params: Params) -> BaseModel:
    if models.mesh is not None:
        params = jax.device_put(params, param_shardings(params, models.mesh))
    return dataclasses.replace(models.base, params=params)


def _kind(leaf: Array | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _gather(rows: list[Generation], length: int) -> Samples:
    tally = AcceptedLengths()
    tokens = np.zeros((len(rows), length), np.int32)
    logprobs, base_logprobs = np.zeros((2, len(rows), length), np.float32)
    for row, generation in enumerate(rows):
        ids, scores = generation.output_ids, generation.scores
        tally.add(len(ids), generation.accepted)
        tokens[row, : len(ids)] = ids
        logprobs[row, : len(ids)] = [score.at_temperature for score in scores]
        base_logprobs[row, : len(ids)] = [score.log_probability for score in scores]

    lengths = np.array([len(generation.output_ids) for generation in rows], np.int32)
    return Samples(
        tokens=tokens,
        mask=np.arange(length) < lengths[:, None],
        logprobs=logprobs,
        base_logprobs=base_logprobs,
        lengths=lengths,
        finish_reasons=[generation.finish_reason or "length" for generation in rows],
        prompt_ids=[generation.prompt_ids for generation in rows],
        tau=tally.tau,
    )
