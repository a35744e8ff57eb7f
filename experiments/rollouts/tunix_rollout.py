"""Rollouts of tunix (google-tunix 0.1.7) by our Sampler: speculative, for the actor as it is.

    models = api.load_draft(api.load_base("BASE"), "runs/clover_lr")
    engine = functools.partial(TunixRollout, models=models, adapt=True)
    ClusterConfig(rollout_engine=engine, ...)

The base in `models` is the checkpoint that the actor was loaded from; its params are replaced with
the actor's. Llama and Qwen3 without experts are mapped, and LoRA is merged.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from clover_jax import api
from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig, RopeConfig
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, base_logits, packed_mask

State = Mapping[str, Array]  # by dotted names, such as layers.0.attn.q_proj.w
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def params_of(config: BaseConfig, state: State, lora_alpha: float | None = None) -> Params:
    """Return our params of a base from a state of tunix.

    lora_alpha: scale of its LoRA, which the state does not have; its rank divides it.
    """

    def weight(name: str) -> Array:
        matrix = state[name]
        if f"{name}_lora_a" not in state:
            return matrix
        if lora_alpha is None:
            raise UserError(f"{name} has a LoRA: lora_alpha must be given")
        # a [inputs, R] and b [R, outputs], of as many axes as the matrix has.
        a, b = state[f"{name}_lora_a"], state[f"{name}_lora_b"]
        change = jnp.tensordot(a, b, 1) * (lora_alpha / a.shape[-1])
        return matrix + change.reshape(matrix.shape)

    def layer(start: str) -> Params:
        query, key, value = (weight(f"{start}attn.{letter}_proj.w") for letter in "qkv")
        heads, out = config.num_kv_heads, weight(f"{start}attn.o_proj.w")
        queries = query.reshape(len(query), heads, config.num_groups, -1)
        attention = {
            "qkv": jnp.concatenate([queries, key[:, :, None], value[:, :, None]], axis=2),
            "out": out.reshape(heads, config.num_groups, *out.shape[1:]),
        }
        if config.query_key_norm:
            for name in ("query", "key"):
                attention[f"{name}_norm"] = state[f"{start}attn.{name[0]}_norm.w"]

        gate, up, down = (weight(f"{start}mlp.{x}_proj.kernel") for x in ("gate", "up", "down"))
        mlp = {"gate_up": jnp.stack([gate, up], axis=1), "down": down}
        norms = {ours: {"scale": state[f"{start}{theirs}.w"]} for ours, theirs in NORMS.items()}
        return {"attention": attention, "mlp": mlp, **norms}

    params = {f"layers_{i}": layer(f"layers.{i}.") for i in range(config.num_layers)}
    params["embedding"] = state["embedder.input_embedding"]
    params["final_norm"] = {"scale": state["final_norm.w"]}
    if not config.tie_word_embeddings:
        params["lm_head"] = weight("lm_head.w").T
    return params


def state_of(config: BaseConfig, params: Params) -> dict[str, Array]:
    """Return the state of tunix for our params; the inverse of `params_of`."""
    state = {"embedder.input_embedding": params["embedding"]}
    state["final_norm.w"] = params["final_norm"]["scale"]
    if not config.tie_word_embeddings:
        state["lm_head.w"] = params["lm_head"].T

    for index in range(config.num_layers):
        layer, start = params[f"layers_{index}"], f"layers.{index}."
        attention, mlp = layer["attention"], layer["mlp"]
        qkv, out = attention["qkv"], attention["out"]
        state[f"{start}attn.q_proj.w"] = qkv[:, :, :-2].reshape(len(qkv), -1, qkv.shape[-1])
        state[f"{start}attn.k_proj.w"] = qkv[:, :, -2]
        state[f"{start}attn.v_proj.w"] = qkv[:, :, -1]
        state[f"{start}attn.o_proj.w"] = out.reshape(-1, *out.shape[2:])
        if config.query_key_norm:
            for name in ("query", "key"):
                state[f"{start}attn.{name[0]}_norm.w"] = attention[f"{name}_norm"]

        state[f"{start}mlp.gate_proj.kernel"] = mlp["gate_up"][:, 0]
        state[f"{start}mlp.up_proj.kernel"] = mlp["gate_up"][:, 1]
        state[f"{start}mlp.down_proj.kernel"] = mlp["down"]
        for ours, theirs in NORMS.items():
            state[f"{start}{theirs}.w"] = layer[ours]["scale"]
    return state


def flattened(state: nnx.State) -> dict[str, Array]:
    """Return the arrays of a state by their dotted names."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


class TunixRollout(BaseRollout):
    """A rollout engine of tunix. `tau` is of the last call of `generate`."""

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any,
        rollout_config: RolloutConfig,
        models: api.Models,
        batch_size: int = 16,
        adapt: bool = False,
        lora_alpha: float | None = None,
    ):
        """Take the actor's params; tunix passes the first four arguments.

        mesh: not used: rollouts are where the models lie (`load_base(mesh=...)`).
        Raises UserError for a base whose rotary embedding tunix ignores.
        """
        config = models.base.config
        if config.rope != RopeConfig(theta=1e6):
            raise UserError(
                "tunix rotates with rope_theta 1000000 and no scaling, whatever a config says; the "
                f"base has {config.rope}, so rollouts would be another model's"
            )
        ends = tuple(rollout_config.eos_tokens or [tokenizer.eos_id()])
        base = dataclasses.replace(
            models.base, config=dataclasses.replace(config, eos_token_ids=ends)
        )
        self._actor, self._tokenizer, self._dtype = rollout_actor, tokenizer, models.dtype
        self._temperature, self._calls = rollout_config.temperature, 0
        self.tau: float | None = None
        self._map = jax.jit(functools.partial(params_of, config, lora_alpha=lora_alpha))
        self._sampler = api.Sampler(
            dataclasses.replace(models, base=base), batch_size=batch_size, adapt=adapt
        )
        # On a mesh the Sampler places them.
        self._place = None if models.mesh else models.base.params["embedding"].sharding
        self.update_params(nnx.state(rollout_actor))

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Return a completion of each prompt, its EOS token included; its text ends before it."""
        config, ends = rollout_config, self._sampler.models.base.config.eos_token_ids
        ids = [self._encoded(text) for text in prompts]
        # Tunix repeats a prompt for each completion of its group; the Sampler reads it once.
        n = math.gcd(*(len(list(group)) for _, group in itertools.groupby(prompts)))
        key = jax.random.key(0) if config.seed is None else config.seed
        seed = int(jax.random.randint(key, (), 0, 2**30)) + self._calls
        self._calls += 1
        samples = self._sampler.sample(
            ids[::n],
            n=n,
            max_new_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_k=max(config.top_k or 0, 0),
            top_p=config.top_p or 1.0,
            seed=seed,
        )
        self.tau = samples.tau

        tokens = [row[mask] for row, mask in zip(samples.tokens, samples.mask, strict=True)]
        scores = samples.logprobs if config.temperature > 0 else samples.base_logprobs
        logprobs = [row[mask] for row, mask in zip(scores, samples.mask, strict=True)]
        longest = max(map(len, ids))
        width = config.max_prompt_length
        if longest > width:
            width = 1 << (longest - 1).bit_length()
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        return RolloutOutput(
            text=[self._tokenizer.decode([i for i in row if i not in ends]) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs if config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Return the log-probabilities of completions at the temperature of rollouts."""
        base = self._sampler.models.base
        temperature = self._temperature or 1.0
        return _log_probabilities(
            base.config, base.params, prompt_tokens, completion_tokens, self.pad_id(), temperature
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Decode with these params from now on; of those not given, with the actor's.

        Matrices that we keep as one are copied, the others are not.
        """
        state = flattened(nnx.state(self._actor)) | flattened(params)
        ours = jax.tree.map(lambda leaf: leaf.astype(self._dtype), self._map(state))
        self._sampler.update_base(jax.device_put(ours, self._place))

    def pad_id(self) -> int:
        """Return the tokenizer's padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the tokenizer's end of a text."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None: of a model that shares the actor's weights, tunix updates no params."""

    def _encoded(self, text: str) -> Sequence[int]:
        bos = self._tokenizer.bos_id()
        ids = [bos] * bool(bos) + list(self._tokenizer.encode(text))  # as tunix's Sampler
        return self._tokenizer.dedup_bos_ids(ids)


@functools.partial(jax.jit, static_argnames=("config", "pad_id", "temperature"))
def _log_probabilities(
    config: BaseConfig,
    params: Params,
    prompts: Int[Array, "B P"],
    completions: Int[Array, "B C"],
    pad_id: int,
    temperature: float,
) -> Float[Array, "B C"]:
    """Return the log-probability of each token of completions after their left-padded prompts."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    is_text = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(is_text, axis=1) - 1, 0)
    mask = packed_mask(is_text.astype(jnp.int32))
    output: Any = Decoder(config).apply({"params": params}, tokens, positions, mask)
    before = output.hidden["post_norm"][:, prompts.shape[1] - 1 : -1]
    scores = jax.nn.log_softmax(base_logits(config, params, before) / temperature)
    return jnp.take_along_axis(scores, completions[..., None], axis=-1)[..., 0]
