"""Every family gives the numbers of a torch model: transformers' own, or a Llama repacked."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_jax.models.distance import alibi_slopes
from clover_jax.models.loading import load_base
from tests.tiny_checkpoints import edit_json
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

# family -> (transformers' class without "Config", changes of the shape)
FAMILIES = {
    "mistral, a short window": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, some layers with a window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(torch, tmp_path_factory, request):
    """A random torch model of a family and the same model loaded by us."""
    import transformers

    name, changes = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    folder = tmp_path_factory.mktemp(name)
    model = save_random_model(getattr(transformers, f"{name}ForCausalLM")(config), folder)
    return model, load_base(str(folder))


def test_logits(pair):
    model, base = pair
    ids = random_ids(64)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)


def test_padded_rows(torch, pair):
    """Each row of a padded batch has torch's logits under its attention mask."""
    model, base = pair
    lengths = (64, 9, 33)
    ids = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = random_ids(length, seed=length)
    real = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
    with torch.no_grad():
        expected = model(torch.tensor(ids), attention_mask=torch.tensor(real)).logits.numpy()
    np.testing.assert_allclose(np.asarray(our_logits(base, ids))[real], expected[real], **CLOSE)


def test_decoding_with_a_cache(pair):
    model, base = pair
    assert_ragged_decoding(lambda ids: torch_logits(model, ids), base)


def test_a_window_skips_whole_chunks_of_a_long_cache(torch, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(**(SHAPE | {"sliding_window": 7}))
    model = save_random_model(MistralForCausalLM(config), tmp_path)
    base = load_base(str(tmp_path))
    assert_ragged_decoding(lambda ids: torch_logits(model, ids), base, cache_length=512)


@pytest.fixture
def llama(torch, tmp_path):
    """A function that makes a random torch Llama without grouped heads, saved in `tmp_path`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(**changes):
        torch.manual_seed(0)
        config = LlamaConfig(**(SHAPE | {"num_key_value_heads": None} | changes))
        return save_random_model(LlamaForCausalLM(config), tmp_path)

    return make


def repack_as_baichuan(folder, architecture, **changes):
    """Turn a saved Llama into Baichuan's layout."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        tensors[name.replace("q_proj", "W_pack")] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    own = {"architectures": [architecture], "model_type": "baichuan", "num_key_value_heads": ...}
    edit_json(folder / "config.json", **(own | changes))


@pytest.mark.parametrize("architecture", ["BaiChuanForCausalLM", "BaichuanForCausalLM"])
def test_baichuan_7b(llama, tmp_path, architecture):
    model = llama()
    repack_as_baichuan(tmp_path, architecture, rope_parameters=...)
    base, ids = load_base(str(tmp_path)), random_ids(64)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)
    assert_ragged_decoding(lambda ids: torch_logits(model, ids), base)


@pytest.mark.parametrize("num_heads", [4, 6])
def test_baichuan_13b(torch, llama, tmp_path, num_heads):
    """Against torch's Llama with its rotation taken out and Bloom's ALiBi as a mask."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    class NoRotation(torch.nn.Module):
        def forward(self, x, position_ids):
            shape = (*position_ids.shape, SHAPE["hidden_size"] // 4)
            return torch.ones(shape), torch.zeros(shape)

    width = {4: 32, 6: 48}[num_heads]
    model = llama(num_attention_heads=num_heads, hidden_size=width)
    model.model.rotary_emb = NoRotation()

    def expected(ids):
        real = torch.ones(1, len(ids), dtype=torch.int64)
        alibi = build_alibi_tensor(real, num_heads, torch.float32)  # [N, 1, T]
        future = torch.triu(torch.full((len(ids), len(ids)), -1e9), diagonal=1)
        return torch_logits(model, ids, attention_mask=(alibi + future)[None])

    repack_as_baichuan(
        tmp_path, "BaichuanForCausalLM", max_position_embeddings=..., model_max_length=96
    )
    base, ids = load_base(str(tmp_path)), random_ids(64)
    assert base.config.alibi
    assert base.config.max_position_embeddings == 96
    np.testing.assert_allclose(our_logits(base, [ids])[0], expected(ids), **CLOSE)
    assert_ragged_decoding(expected, base)


def test_baichuan_2_has_a_normalised_output_matrix(torch, llama, tmp_path):
    model = llama()
    repack_as_baichuan(tmp_path, "BaichuanForCausalLM", z_loss_weight=0)
    with torch.no_grad():
        rows = model.lm_head.weight
        rows.copy_(torch.nn.functional.normalize(rows))
    base, ids = load_base(str(tmp_path)), random_ids(64)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 32, 40])
def test_alibi_slopes_are_blooms(torch, num_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    distances = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
    np.testing.assert_allclose(alibi_slopes(num_heads), distances[:, 0, 1].numpy(), rtol=1e-6)
