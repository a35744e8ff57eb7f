"""Random torch models saved as checkpoints, and the comparison of their logits with ours."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.models.cache import init_base_cache, write_rows
from clover_jax.models.decoder import Decoder, base_logits, causal_mask, packed_mask

CLOSE = {"atol": 1e-4, "rtol": 0}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from 0, so that a mistake shows
}
Logits = Callable[[list[int]], np.ndarray]


def save_random_model(model, folder: Path, dtype: str = "float32", max_shard_size: str = "1GB"):
    """Save a fresh torch model with lively biases and norms; return it as read anew."""
    import torch

    scales = [x for name, x in model.named_buffers() if name.endswith("layer_scalar")]  # Gemma 4's
    with torch.no_grad():
        for parameter in [*model.parameters(), *scales]:
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
    ids = np.asarray(ids, np.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)

    @jax.jit
    def forward(params, ids, positions, mask):
        mask = causal_mask(*ids.shape) if mask is None else mask
        output = Decoder(base.config).apply({"params": params}, ids, positions, mask)
        return base_logits(base.config, params, output.hidden["post_norm"])

    return forward(base.params, ids, positions, mask)


def random_ids(num: int, vocab_size: int = 64, seed: int = 0) -> list[int]:
    """Return `num` random tokens."""
    return np.random.default_rng(seed).integers(vocab_size, size=num).tolist()


def assert_padded_rows(expected: Logits, base: BaseModel, rows=((64,), (9,), (33, 1, 20))) -> None:
    """Compare the documents of a padded and packed batch with a full forward of each alone.

    expected: the logits of a full forward, one document alone. rows: lengths of their documents.
    """
    tokens, segments, positions = np.zeros((3, len(rows), max(map(sum, rows))), np.int32)
    documents = []
    for index, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        for number, (size, end) in enumerate(zip(lengths, ends, strict=True), start=1):
            place = (index, slice(end - size, end))
            documents.append((place, random_ids(size, seed=size)))
            tokens[place], segments[place] = documents[-1][1], number
            positions[place] = np.arange(size)

    found = np.asarray(our_logits(base, tokens, positions, packed_mask(jnp.asarray(segments))))
    for place, ids in documents:
        np.testing.assert_allclose(found[place], expected(ids), **CLOSE)


def assert_ragged_decoding(
    expected: Logits, base: BaseModel, cache_length: int = 64, prompts=(10, 19, 1)
) -> None:
    """Prefill padded prompts of unequal length, then go on token by token in one batch.

    expected: the logits of a full forward, one row alone.
    """
    num_steps, prompts = 20, np.array(prompts)
    rows = [random_ids(size + num_steps, seed=int(size)) for size in prompts]
    decoder, config = Decoder(base.config), base.config

    @jax.jit
    def forward(params, ids, cache, length, count):
        positions = length[:, None] + jnp.arange(ids.shape[1])
        variables = {"params": params}
        output = decoder.apply(variables, ids, positions, causal_mask(*ids.shape), cache, length)
        logits = base_logits(config, params, output.hidden["post_norm"])
        return logits, write_rows(cache, output.fresh, length, count)

    padded = np.zeros((len(rows), max(prompts)), np.int32)
    for index, (row, size) in enumerate(zip(rows, prompts, strict=True)):
        padded[index, :size] = row[:size]
    cache = init_base_cache(config, len(rows), cache_length, "float32")
    none = np.zeros(len(rows), np.int32)
    logits, cache = forward(base.params, padded, cache, none, prompts.astype(np.int32))
    found = [[np.asarray(logits)[i, :size]] for i, size in enumerate(prompts)]
    for step in range(num_steps):
        ids = [[row[size + step]] for row, size in zip(rows, prompts, strict=True)]
        length = (prompts + step).astype(np.int32)
        logits, cache = forward(base.params, np.array(ids, np.int32), cache, length, none + 1)
        for index, row_logits in enumerate(np.asarray(logits)):
            found[index].append(row_logits)
    for index, row in enumerate(rows):
        np.testing.assert_allclose(np.concatenate(found[index]), expected(row), **CLOSE)
