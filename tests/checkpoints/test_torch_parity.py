"""The decoder gives the numbers of transformers' torch Llama, on random models saved by it."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.models.decoder import packed_mask
from tests.torch_pairs import (
    CLOSE,
    SHAPE,
    assert_ragged_decoding,
    our_logits,
    random_ids,
    save_random_model,
    torch_logits,
)

pytestmark = pytest.mark.parity
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "one query head per key": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "rope llama3": {"rope_parameters": LLAMA3},
    "rope linear": {"rope_parameters": LINEAR},
    "rope yarn": {"rope_parameters": YARN},
    "rope yarn without whole pairs": {"rope_parameters": YARN | {"truncate": False}},
    "rope dynamic": {"rope_parameters": LINEAR | {"rope_type": "dynamic"}},
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
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(SHAPE | changes)))
        model = save_random_model(model, tmp_path, dtype, max_shard_size)
        return model, load_base(str(tmp_path))

    return make_pair


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
    model, base = make_pair()
    assert_ragged_decoding(lambda ids: torch_logits(model, ids), base, cache_length)


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
