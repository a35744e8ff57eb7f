"""Random torch models saved as checkpoints, and the comparison of their logits with ours."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.models.base import BaseModel
from clover_jax.models.cache import init_cache, write_rows
from clover_jax.models.decoder import Decoder, causal_mask, project

CLOSE = {"atol": 1e-4, "rtol": 0}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from 0, so that a mistake shows
}
Logits = Callable[[list[int]], np.ndarray]


def save_random_model(model, folder: Path, dtype: str = "float32", max_shard_size: str = "1GB"):
    """Save a fresh torch model with lively biases and norms; return it as read anew."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms, which start as constants
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    # Read anew: `to` has rounded torch's rotary frequencies too, which are not in the files.
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def torch_logits(model, ids: list[int], **arguments) -> np.ndarray:
    """Logits [T, V] of a list of tokens."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids]), **arguments).logits[0].numpy()


def our_logits(base: BaseModel, ids, positions=None, mask=None):
    """Logits [B, T, V] of a full forward."""
    ids = jnp.asarray(ids, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = causal_mask(*ids.shape) if mask is None else mask
    output = jax.jit(Decoder(base.config).apply)({"params": base.params}, ids, positions, mask)
    return project(base.lm_head, output.hidden["post_norm"])


def random_ids(num: int, vocab_size: int = 64, seed: int = 0) -> list[int]:
    """Return `num` random tokens."""
    return np.random.default_rng(seed).integers(vocab_size, size=num).tolist()


def assert_ragged_decoding(expected: Logits, base: BaseModel, cache_length: int = 64) -> None:
    """Prefill padded prompts of unequal length, then go on token by token in one batch.

    expected: the logits of a full forward, one row alone.
    """
    rows = [random_ids(n, seed=n) for n in (30, 41, 25)]
    prompts = np.array([10, 19, 1])
    num_steps = 20
    decoder, config = Decoder(base.config), base.config

    @jax.jit
    def forward(ids, cache, length):
        positions = length[:, None] + jnp.arange(ids.shape[1])
        variables = {"params": base.params}
        output = decoder.apply(variables, ids, positions, causal_mask(*ids.shape), cache, length)
        logits = project(base.lm_head, output.hidden["post_norm"])
        return logits, write_rows(cache, output.fresh, length)

    padded = np.zeros((len(rows), max(prompts)), np.int32)
    for index, (row, size) in enumerate(zip(rows, prompts, strict=True)):
        padded[index, :size] = row[:size]
    cache = init_cache(config.layer, config.num_layers, len(rows), cache_length, "float32")
    logits, cache = forward(jnp.asarray(padded), cache, jnp.zeros(len(rows), jnp.int32))
    found = [[logits[i, :size]] for i, size in enumerate(prompts)]
    for step in range(num_steps):
        ids = [[row[size + step]] for row, size in zip(rows, prompts, strict=True)]
        logits, cache = forward(jnp.asarray(ids), cache, jnp.asarray(prompts + step))
        for index in range(len(rows)):
            found[index].append(logits[index])
    for index, (row, size) in enumerate(zip(rows, prompts, strict=True)):
        full = expected(row[: size + num_steps])
        np.testing.assert_allclose(np.concatenate(found[index]), full, **CLOSE)
