"""Every family gives the numbers of a torch model: transformers' own, or a Llama repacked."""

import functools
import json
import re
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_jax.checkpoints.loading import load_base
from clover_jax.models.attention import CACHE_CHUNK
from clover_jax.models.score_rules import alibi_slopes
from tests.tiny_checkpoints import edit_json
from tests.torch_pairs import (
    CLOSE,
    SHAPE,
    Logits,
    assert_padded_rows,
    assert_ragged_decoding,
    our_logits,
    random_ids,
    save_random_model,
    torch_logits,
)

pytestmark = pytest.mark.parity

# A head count that is no power of two has slopes of another rule.
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
NO_GROUPS = {"num_key_value_heads": 4}
WINDOW = 7
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
VL_EXPERTS = {"moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True}
GPT_OSS = EXPERTS | {"sliding_window": WINDOW, "intermediate_size": 64}
# Scores are scaled by another number than the heads' width; one layer has a window, one has none.
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
GEMMA |= {"layer_types": ["full_attention", "sliding_attention"]}
# Full layers have one wide key head, which makes values too.
GEMMA4 = {"num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW}
GEMMA4 |= {"layer_types": ["sliding_attention", *["full_attention"] * 2]}
GEMMA4 |= {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
# Of five layers the last two read the keys of the layers 1 and 2.
SHARED = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
SHARED |= {"layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2]}
SHARED |= {"initializer_range": 0.1}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
GEMMA4_EXPERTS |= {"moe_intermediate_size": 24}
SMOLLM3 = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # its own lie beyond SHAPE's
# Two delta nets, attention, and a delta net again; keys and values have other sizes than heads.
HYBRID = {"num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0, "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 8}
# With SHAPE's 0.2 torch's own float32 logits are 3e-4 away from its float64 ones.
HYBRID |= {"initializer_range": 0.1}
HYBRID |= {"layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]}
YARN_4 = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN_4 |= {"original_max_position_embeddings": 32}
OLMO3 = {"num_hidden_layers": 4, "sliding_window": WINDOW, "eos_token_id": 2, "pad_token_id": 0}
OLMO3 |= {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
GLM = {"head_dim": 8, "eos_token_id": 2, "pad_token_id": 0}
GLM_MOE = GLM | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_MOE |= {"routed_scaling_factor": 2.5}
TWO_DENSE = {"first_k_dense_replace": 2, "norm_topk_prob": False}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
# Texts longer than 66 tokens have other keys.
PHI = {"original_max_position_embeddings": 66, "pad_token_id": 0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}


class Family(NamedTuple):
    """A random torch model to compare with.

    architecture: the class in transformers, without "ForCausalLM". changes: of the shape.
    repack: what makes another family's folder of the saved one, and wraps or edits the model.
    """

    architecture: str
    changes: dict
    repack: str | None = None


FAMILIES = {
    "mistral, a short window": Family("Mistral", {"sliding_window": WINDOW}),
    "mistral, no window": Family("Mistral", {"sliding_window": None, **NO_GROUPS}),
    "mistral 3 with images": Family("Mistral", {"sliding_window": None}, "multimodal"),
    "qwen2": Family("Qwen2", {}),
    "qwen2, some layers with a window": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3": Family(
        "Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    ),
    "gpt-oss, a short window": Family("GptOss", GPT_OSS),
    "gpt-oss, experts in mxfp4": Family("GptOss", GPT_OSS | {"sliding_window": 100}, "mxfp4"),
    "phi3, fused matrices and longrope of a part of each head": Family(
        "Phi3", PHI | {"head_dim": 8, "rope_parameters": LONGROPE}
    ),
    "phi3, a short window": Family(
        "Phi3", {"sliding_window": WINDOW, "pad_token_id": 0, **NO_GROUPS}
    ),
    "mixtral": Family("Mixtral", EXPERTS | {"sliding_window": WINDOW}),
    "qwen3-moe, a dense layer": Family(
        "Qwen3Moe",
        EXPERTS | {"moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "gemma2, caps that bind and a short window": Family(
        "Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma3, two rotations and a short window": Family(
        "Gemma3Text", GEMMA | {"rope_parameters": {"full_attention": LINEAR}}
    ),
    "gemma3 with images, a window longer than the text": Family(
        "Gemma3Text", GEMMA | {"sliding_window": 100}, "multimodal"
    ),
    "gemma4, wider heads and a short window": Family("Gemma4Text", GEMMA4),
    "gemma4, values of their own": Family("Gemma4Text", GEMMA4 | {"attention_k_eq_v": False}),
    "gemma4, experts next to the MLP": Family("Gemma4Text", GEMMA4 | GEMMA4_EXPERTS),
    "gemma4 with images": Family("Gemma4Text", GEMMA4 | GEMMA4_EXPERTS, "with towers"),
    "gemma4, shared keys and embeddings for each layer": Family(
        "Gemma4Text", GEMMA4 | SHARED | {"attention_k_eq_v": False}
    ),
    "gemma4, shared keys with images": Family("Gemma4Text", GEMMA4 | SHARED, "with towers"),
    "gemma4 unified": Family("Gemma4UnifiedText", GEMMA4),
    "smollm3, a layer that does not rotate": Family(
        "SmolLM3", SMOLLM3 | {"no_rope_layer_interval": 2}
    ),
    "smollm3, a window where it does not rotate": Family(
        "SmolLM3",
        SMOLLM3 | {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
    ),
    "granite": Family(
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.02,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.5,
            "attention_bias": True,
        },
    ),
    "qwen3-vl, its text": Family("Qwen3", {"head_dim": 16}, "with images"),
    "qwen3-vl moe, its text as transformers saves it": Family(
        "Qwen3Moe", EXPERTS | VL_EXPERTS, "with images"
    ),
    "qwen3-vl moe, its text as published": Family("Qwen3Moe", EXPERTS | VL_EXPERTS, "turned"),
    "olmo2": Family("Olmo2", {}),
    "olmo3, two rotations and a short window": Family(
        "Olmo3", OLMO3 | {"rope_parameters": {"full_attention": YARN_4}}
    ),
    "glm4": Family("Glm4", GLM),
    "glm4 moe": Family(
        "Glm4Moe", GLM_MOE | {"use_qk_norm": True, "attention_bias": True}, "choice"
    ),
    "glm4 moe, two dense layers and two shared experts": Family(
        "Glm4Moe", GLM_MOE | {"num_hidden_layers": 4, "n_shared_experts": 2} | TWO_DENSE, "choice"
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeText",
        HYBRID
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3.5-moe with images, experts of a layer together": Family(
        "Qwen3_5MoeText",
        HYBRID
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
        "published",
    ),
    "qwen3-next, a dense layer": Family(
        "Qwen3Next",
        HYBRID
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3.5": Family("Qwen3_5Text", HYBRID | {"linear_num_value_heads": 2}),
    "qwen3.5, more values than keys": Family("Qwen3_5Text", HYBRID),
    "baichuan 7b": Family("Llama", NO_GROUPS, "rotary"),
    "baichuan 13b": Family("Llama", SIX_HEADS, "alibi"),
    "baichuan 2": Family("Llama", NO_GROUPS, "normalized"),
}


@pytest.fixture(scope="module", autouse=True)
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def make(torch, tmp_path_factory):
    """A function that makes a family's (expected logits, base), once for each."""
    import transformers

    @functools.cache
    def make(name):
        family = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family.architecture}Config")
        model = getattr(transformers, f"{family.architecture.removesuffix('Text')}ForCausalLM")
        folder = tmp_path_factory.mktemp("family")
        saved = save_random_model(model(config(**(SHAPE | family.changes))), folder)
        expected = functools.partial(torch_logits, saved)
        if family.repack:
            expected = REPACKS[family.repack](saved, folder)
        return expected, load_base(str(folder))

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_rows(make, name):
    """64 tokens, and shorter rows and packed documents beside them."""
    assert_padded_rows(*make(name))


# Other folders of a decoder that is here under another name: that they are read right the logits
# of whole rows show.
ELSEWHERE = ("multimodal", "with images", "turned", "with towers", "published", "mxfp4", "rotary")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (family.repack in ELSEWHERE))
        for name, family in FAMILIES.items()
    ],
)
def test_decoding_with_a_cache(make, name):
    assert_ragged_decoding(*make(name))


def test_texts_of_several_windows_of_a_delta_net(make):
    assert_padded_rows(*make("qwen3.5"), rows=((150,), (20, 63, 1, 66), (65,)))


def test_a_window_leaves_whole_chunks_of_a_long_cache_behind(make):
    """The first chunk is needed at first, and no longer when the shortest row has grown."""
    expected, base = make("mistral, a short window")
    prompts = np.array([10, 19, 0]) + CACHE_CHUNK - 4
    assert prompts.min() < CACHE_CHUNK < prompts.min() + 20 - WINDOW
    assert_ragged_decoding(expected, base, 2 * CACHE_CHUNK, prompts)


def repack_as_baichuan(folder, architecture="BaichuanForCausalLM", **changes):
    """Turn a saved Llama into Baichuan's layout."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        tensors[name.replace("q_proj", "W_pack")] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    own = {"architectures": [architecture], "model_type": "baichuan", "num_key_value_heads": ...}
    edit_json(folder / "config.json", **(own | changes))


def repack_rotary(model, folder) -> Logits:
    """7B: the same numbers, in other tensors."""
    repack_as_baichuan(folder, rope_parameters=...)
    return functools.partial(torch_logits, model)


def repack_alibi(model, folder) -> Logits:
    """13B: torch's Llama with its rotation taken out and Bloom's ALiBi as a mask."""
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    heads, width = model.config.num_attention_heads, model.config.hidden_size

    class NoRotation(torch.nn.Module):
        def forward(self, x, position_ids):
            shape = (*position_ids.shape, width // heads)
            return torch.ones(shape), torch.zeros(shape)

    model.model.rotary_emb = NoRotation()
    repack_as_baichuan(folder, max_position_embeddings=..., model_max_length=96)

    def expected(ids):
        real = torch.ones(1, len(ids), dtype=torch.int64)
        alibi = build_alibi_tensor(real, heads, torch.float32)  # [N, 1, T]
        future = torch.triu(torch.full((len(ids), len(ids)), -1e9), diagonal=1)
        return torch_logits(model, ids, attention_mask=(alibi + future)[None])

    return expected


def repack_normalized(model, folder) -> Logits:
    """Baichuan 2: the rows of lm_head have length 1 when they are used, not as they are stored."""
    import torch

    repack_as_baichuan(folder, z_loss_weight=0)
    with torch.no_grad():
        rows = model.lm_head.weight
        rows.copy_(torch.nn.functional.normalize(rows))
    return functools.partial(torch_logits, model)


def repack_multimodal(model, folder) -> Logits:
    """Gemma 3 of 4B and more, Mistral 3: the text is a part of the whole, in fields and names."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.embeddings.position_embedding.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    name = "Gemma3" if model.config.model_type == "gemma3_text" else "Mistral3"
    whole = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    return functools.partial(torch_logits, model)


def repack_with_images(model, folder) -> Logits:
    """Qwen3-VL: the text is Qwen3, dense or MoE, whose three rotations are one without images."""
    import torch
    import transformers

    text = json.loads((folder / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": SHAPE["hidden_size"], "deepstack_visual_indexes": [0]}
    vision |= {"num_position_embeddings": 16}
    name = "Qwen3VLMoe" if text.pop("model_type") == "qwen3_moe" else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        found = whole.model.language_model.load_state_dict(model.model.state_dict())
        whole.lm_head.load_state_dict(model.lm_head.state_dict())
    assert not found.missing_keys
    for path in folder.iterdir():
        path.unlink()
    whole.save_pretrained(folder)
    return functools.partial(torch_logits, whole)


def repack_turned(model, folder) -> Logits:
    """Qwen3-VL MoE as published: experts' matrices are [in, out]."""
    expected = repack_with_images(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, folder / "model.safetensors")
    return expected


def repack_published(model, folder) -> Logits:
    """Qwen3.5-MoE as published: experts of a layer together, parts for images, a drafting layer."""
    tensors, experts = load_file(folder / "model.safetensors"), range(model.config.num_experts)
    for index in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{index}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}{e}.{side}_proj.weight") for e in experts])
            for side in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}down_proj"] = down
    tensors = {re.sub(r"^model\.", "model.language_model.", n): x for n, x in tensors.items()}
    for other in ("model.visual.pos_embed.weight", "mtp.fc.weight"):
        tensors[other] = np.ones((4, 4), np.float32)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    whole |= {"text_config": text, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    return functools.partial(torch_logits, model)


def repack_with_towers(model, folder) -> Logits:
    """Gemma 4: the text is a part of the model that is published."""
    import torch
    import transformers

    text = model.config.to_dict()
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision |= {"position_embedding_size": 16}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision)
    whole = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        found = whole.model.language_model.load_state_dict(model.model.state_dict())
    assert not found.missing_keys
    for path in folder.iterdir():
        path.unlink()
    whole.save_pretrained(folder)
    # Published layers that share keys have matrices for them all the same.
    if model.config.num_kv_shared_layers:
        tensors = load_file(folder / "model.safetensors")
        last = f"model.language_model.layers.{model.config.num_hidden_layers - 1}.self_attn"
        tensors |= {f"{last}.{name}.weight": np.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
        save_file(tensors, folder / "model.safetensors")
    return functools.partial(torch_logits, whole)


def repack_mxfp4(model, folder) -> Logits:
    """gpt-oss as published: experts of four bits, and biases that are not zero."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    stored = dict(model.named_parameters())
    with torch.no_grad():
        for name in [name for name in tensors if ".experts." in name]:
            if name.endswith("_bias"):
                stored[name].normal_(std=0.2)
                tensors[name] = stored[name].numpy()
                continue
            number, inputs, outputs = tensors.pop(name).shape
            blocks = rng.integers(256, size=(number, outputs, inputs // 32, 16), dtype=np.uint8)
            scales = rng.integers(123, 126, size=blocks.shape[:3], dtype=np.uint8)
            packed = (torch.tensor(blocks), torch.tensor(scales))
            stored[name].copy_(convert_moe_packed_tensors(*packed, dtype=torch.float32))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return functools.partial(torch_logits, model)


def repack_choice(model, folder) -> Logits:
    """GLM-4.5: a bias that decides between experts, and a layer that drafts behind the last."""
    import torch

    tensors, count = load_file(folder / "model.safetensors"), model.config.num_hidden_layers
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.3 * torch.randn_like(bias))
            tensors[name] = bias.numpy()
    for end in ("eh_proj.weight", "mlp.gate.weight"):
        tensors[f"model.layers.{count}.{end}"] = np.ones((4, 4), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return functools.partial(torch_logits, model)


REPACKS = {"mxfp4": repack_mxfp4, "rotary": repack_rotary, "alibi": repack_alibi}
REPACKS |= {"normalized": repack_normalized, "multimodal": repack_multimodal}
REPACKS |= {"with images": repack_with_images, "choice": repack_choice}
REPACKS |= {"with towers": repack_with_towers, "published": repack_published}
REPACKS |= {"turned": repack_turned}


def test_baichuan_2_stores_rows_of_any_length(make):
    """Else normalizing them would change nothing, and the comparison could not fail."""
    _, base = make("baichuan 2")
    stored = load_file(base.directory / "model.safetensors")["lm_head.weight"]
    assert np.abs(np.linalg.norm(stored, axis=1) - 1).max() > 0.1


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 32, 40])
def test_alibi_slopes_are_blooms(torch, num_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    distances = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
    np.testing.assert_allclose(alibi_slopes(num_heads), distances[:, 0, 1].numpy(), rtol=1e-6)


FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, **FACTORS}
LLAMA3 |= {"original_max_position_embeddings": 32}
SCALED = {"rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "beta_fast": 4.0, "original_max_position_embeddings": 32, **SCALED}
VARIANTS = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "one query head per key": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "rope llama3": {"rope_parameters": LLAMA3},
    "rope linear": {"rope_parameters": LINEAR | SCALED},
    "rope yarn": {"rope_parameters": YARN},
    "rope yarn without whole pairs": {"rope_parameters": YARN | {"truncate": False}},
    "rope dynamic": {"rope_parameters": SCALED | {"rope_type": "dynamic"}},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


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


def test_logits_of_sharded_bfloat16_files(make_pair, tmp_path):
    model, base = make_pair(max_shard_size="10KB", dtype="bfloat16")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = random_ids(40)
    np.testing.assert_allclose(our_logits(base, [ids])[0], torch_logits(model, ids), **CLOSE)


def test_ragged_rows_decoded_with_a_cache_of_several_chunks(make_pair):
    model, base = make_pair()
    assert_ragged_decoding(lambda ids: torch_logits(model, ids), base, 2 * CACHE_CHUNK)
