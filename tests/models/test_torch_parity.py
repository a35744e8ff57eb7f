"""The decoder gives the numbers of transformers' torch Llama, on random models saved by it."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.models.cache import init_cache, write_rows
from clover_jax.models.decoder import Decoder, causal_mask, packed_mask, project
from clover_jax.models.loading import load_base

pytestmark = pytest.mark.parity
CLOSE = {"atol": 1e-4, "rtol": 0}
EXTRA_BASE = os.environ.get("CLOVER_JAX_EXTRA_BASE")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
VARIANTS = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "one query head per key": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "rope llama3": {"rope_parameters": LLAMA3},
    "rope linear": {"rope_parameters": LINEAR},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.fixture(scope="module", autouse=True)
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def make_pair(torch, tmp_path):
    """A function that makes a random torch model and the same model loaded by us."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make_pair(max_shard_size="1GB", dtype="float32", **changes):
        shape = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,  # far from 0, so that a mistake shows
        }
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases and norms, which start as constants
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=max_shard_size)
        # Read anew: `to` has rounded torch's rotary frequencies too, which are not in the files.
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        return model, load_base(str(tmp_path))

    return make_pair


def torch_logits(model, ids):
    """Logits of a list of tokens."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def our_logits(base, ids, positions=None, mask=None):
    ids = jnp.asarray(ids, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = causal_mask(*ids.shape) if mask is None else mask
    output = jax.jit(Decoder(base.config).apply)({"params": base.params}, ids, positions, mask)
    return project(base.lm_head, output.hidden["post_norm"])


def random_ids(num, vocab_size=64, seed=0):
    return np.random.default_rng(seed).integers(vocab_size, size=num).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(make_pair, variant):
    model, base = make_pair(**VARIANTS[variant])
    ids = random_ids(96)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)


def test_logits_of_sharded_files(make_pair, tmp_path):
    model, base = make_pair(max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = random_ids(40)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)


def test_logits_of_bfloat16_files(make_pair):
    model, base = make_pair(dtype="bfloat16")
    ids = random_ids(40)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)


def test_packed_documents_equal_each_alone(make_pair):
    model, base = make_pair()
    lengths = (7, 1, 20, 4)
    documents = [random_ids(n, seed=n) for n in lengths]
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    packed, mask = np.concatenate(documents)[None], packed_mask(jnp.asarray(segments))
    logits = our_logits(base, packed, jnp.asarray(positions), mask)
    expected = np.concatenate([torch_logits(model, document) for document in documents])
    np.testing.assert_allclose(logits[0], expected, **CLOSE)


@pytest.mark.parametrize("cache_length", [64, 512], ids=["one chunk", "several chunks"])
def test_ragged_rows_decoded_with_a_cache(make_pair, cache_length):
    """Prefill padded prompts of unequal length, then go on token by token in one batch."""
    model, base = make_pair()
    rows = [random_ids(n, seed=n) for n in (30, 41, 25)]
    prompts = np.array([10, 19, 1])
    num_steps = 20
    decoder = Decoder(base.config)

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
    cache = init_cache(
        base.config.layer, base.config.num_layers, len(rows), cache_length, "float32"
    )
    logits, cache = forward(jnp.asarray(padded), cache, jnp.zeros(len(rows), jnp.int32))
    found = [[logits[i, :size]] for i, size in enumerate(prompts)]
    for step in range(num_steps):
        ids = [[row[size + step]] for row, size in zip(rows, prompts, strict=True)]
        logits, cache = forward(jnp.asarray(ids), cache, jnp.asarray(prompts + step))
        for index in range(len(rows)):
            found[index].append(logits[index])
    for index, (row, size) in enumerate(zip(rows, prompts, strict=True)):
        expected = torch_logits(model, row[: size + num_steps])
        np.testing.assert_allclose(np.concatenate(found[index]), expected, **CLOSE)


@pytest.mark.skipif(not EXTRA_BASE, reason="CLOVER_JAX_EXTRA_BASE names no folder")
def test_logits_of_the_extra_base():
    """A trained model of one's own choice: CLOVER_JAX_EXTRA_BASE=DIR."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(EXTRA_BASE, dtype=torch.float32).eval()
    base = load_base(EXTRA_BASE)
    ids = random_ids(200, base.config.vocab_size)
    found, expected = our_logits(base, [ids])[0], torch_logits(model, ids)
    print(f"largest difference {np.abs(found - expected).max():.2e}")
    np.testing.assert_allclose(found, expected, **CLOSE)
