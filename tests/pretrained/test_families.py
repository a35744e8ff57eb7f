"""Each family's config.json says what its decoder must be, in the words that the family uses."""

import json
import math

import pytest

from clover_jax.errors import UserError
from clover_jax.pretrained.families import ARCHITECTURES, read_base_config

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def read(tmp_path):
    """A function that writes a config.json of an architecture and reads it."""

    def read(architecture, **changes):
        values = SHAPE | {"architectures": [architecture]} | changes
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_base_config(tmp_path)

    return read


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_reads(read, architecture):
    assert read(architecture, text_config=SHAPE).vocab_size == 96


@pytest.mark.parametrize(
    "changes, window",
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)],
)
def test_mistrals_window(read, changes, window):
    config = read("MistralForCausalLM", **changes)
    assert config.layer_at(2).sliding_window == window
    assert config.layer.sliding_window is None  # a head's layer
    assert not config.qkv_bias


def test_qwen2_has_biases_of_q_k_v_and_no_window_unless_used(read):
    config = read("Qwen2ForCausalLM", sliding_window=5, max_window_layers=1)
    assert (config.qkv_bias, config.output_bias, config.sliding_window) == (True, False, None)
    config = read(
        "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=5, max_window_layers=1
    )
    assert [config.layer_at(i).sliding_window for i in range(3)] == [None, 5, 5]


@pytest.mark.parametrize("count", [None, -1, 1.5])
def test_a_count_of_layers_without_a_window_is_a_whole_number(read, count):
    message = f"max_window_layers must be a whole number, 0 or more, not {count}"
    with pytest.raises(UserError, match=message):
        read("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=count)


def test_layer_types_win_over_a_count_of_layers(read):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=5, layer_types=types)
    assert [config.layer_at(i).sliding_window for i in range(3)] == [5, None, 5]


def test_qwen3_has_head_norms_and_wide_heads(read):
    config = read("Qwen3ForCausalLM")
    assert (config.query_key_norm, config.head_dim, config.qkv_bias) == (True, 128, False)


@pytest.mark.parametrize(
    "architecture, changes, alibi",
    [
        ("BaiChuanForCausalLM", {}, False),
        ("BaichuanForCausalLM", {"max_position_embeddings": 64}, False),
        ("BaichuanForCausalLM", {"model_max_length": 64}, True),
    ],
)
def test_baichuans_positions(read, architecture, changes, alibi):
    config = read(architecture, **changes)
    assert (config.alibi, config.num_kv_heads) == (alibi, 4)
    assert config.max_position_embeddings == (64 if changes else 4096)


def test_a_text_is_no_longer_than_phis_short_factors_go(read):
    scaling = {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    config = read(
        "Phi3ForCausalLM",
        rope_scaling=scaling,
        partial_rotary_factor=0.75,
        max_position_embeddings=131_072,
    )
    assert (config.max_position_embeddings, config.rope.share) == (4096, 0.75)
    assert config.rope.attention_factor == math.sqrt(1 + math.log(32) / math.log(4096))


@pytest.mark.parametrize(
    "architecture, changes, windows, thetas",
    [
        ("Gemma2ForCausalLM", {}, [4096, None] * 3, [1e4] * 6),
        ("Gemma3ForCausalLM", {}, [4096] * 5 + [None], [1e4] * 5 + [1e6]),
        (
            "Gemma3ForCausalLM",
            {"sliding_window_pattern": 2, "rope_local_base_freq": 2e4, "rope_theta": 3e5},
            [4096, None] * 3,
            [2e4, 3e5] * 3,
        ),
    ],
)
def test_gemmas_layers_alternate(read, architecture, changes, windows, thetas):
    config = read(architecture, num_hidden_layers=6, **changes)
    layers = [config.layer_at(i) for i in range(6)]
    assert [layer.sliding_window for layer in layers] == windows
    assert [layer.rope.theta for layer in layers] == thetas
    assert (config.embedding_scale, layers[0].score_scale) == (32**0.5, 1 / 16)
    assert (config.tie_word_embeddings, layers[0].post_norms) == (True, True)


def test_a_config_without_architecture_is_known_by_its_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen2"}))
    assert read_base_config(tmp_path).qkv_bias


@pytest.mark.parametrize(
    "architecture, changes, message",
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a positive whole nu"),
        (
            "MistralForCausalLM",
            {"layer_types": ["full_attention"]},
            "layer_types must list 3 types",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["full_attention", "linear", "x"]},
            "layer type 'linear' is not supported, only sliding_attention and full_attention",
        ),
        (
            "MixtralForCausalLM",
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok \(9\) is more than num_local_experts \(8\)",
        ),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_alpha 1.702 and swiglu_limit 5.0 are"),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized checkpoints are not supported",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "num_experts must be a positive whole number"),
        (
            "Gemma3ForCausalLM",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is not supported: text is causal",
        ),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "softcapping must be a positive numb"),
        ("Gemma3ForConditionalGeneration", {"text_config": None}, "text_config must be an object"),
        ("LlamaForCausalLM", {"architectures": "Llama"}, "architectures must be a list of names"),
    ],
)
def test_what_cannot_be_is_refused(read, architecture, changes, message):
    with pytest.raises(UserError, match=message):
        read(architecture, **changes)
