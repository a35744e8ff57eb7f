"""A config.json says what the decoder must be; anything that it cannot be is refused by name."""

import json
import math

import pytest

from clover_jax.checkpoints.loading import ARCHITECTURES, read_checkpoint
from clover_jax.config import RopeConfig
from clover_jax.errors import UserError

MINIMAL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32}
MINIMAL |= {"intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
ORIGINAL_64 = {"original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True}
LONGROPE = {"rope_type": "longrope", "short_factor": [1, 1.5, 2, 3]}


@pytest.fixture
def read_fields(tmp_path):
    """A function that writes a config.json with changes (and a generation config) and reads it."""

    def read_fields(generation=None, **changes):
        values = {k: v for k, v in (MINIMAL | changes).items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_checkpoint(tmp_path).config

    return read_fields


@pytest.fixture
def read(read_fields):
    """A function that reads a config.json of an architecture with grouped heads."""

    def read(architecture, **changes):
        return read_fields(**{"architectures": [architecture], "num_key_value_heads": 2} | changes)

    return read


def test_defaults_are_those_of_transformers(read_fields):
    config = read_fields()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert config.max_position_embeddings == 2048
    assert (config.tie_word_embeddings, config.qkv_bias, config.mlp_bias) == (False,) * 3
    assert config.eos_token_ids == ()
    # Null is as absent, and what is given is kept.
    assert read_fields(max_position_embeddings=None).max_position_embeddings == 2048
    assert read_fields(num_key_value_heads=None).num_kv_heads == 4
    config = read_fields(num_key_value_heads=2, head_dim=16, attention_bias=True, mlp_bias=True)
    assert (config.num_kv_heads, config.head_dim) == (2, 16)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(kind="linear", factor=4.0)),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
         RopeConfig(kind="linear", factor=4.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, RopeConfig()),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
         RopeConfig(1e4, "yarn", 4.0, **ORIGINAL_64, attention_factor=0.1 * math.log(4) + 1)),
        (
            {"max_position_embeddings": 256, "rope_scaling": LONGROPE | ORIGINAL_64},
            RopeConfig(
                kind="longrope",
                pair_factors=(1.0, 1.5, 2.0, 3.0),
                attention_factor=math.sqrt(1 + math.log(4) / math.log(64)),
                **ORIGINAL_64,
            ),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
         RopeConfig(theta=5e5, kind="llama3", **LLAMA3)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
         RopeConfig(theta=5e5, kind="llama3", **LLAMA3)),
    ],
)  # fmt: skip
def test_rope_in_old_and_new_fields(read_fields, fields, expected):
    assert read_fields(**fields).rope == expected


@pytest.mark.parametrize(
    "in_config, in_generation, expected",
    [
        (2, None, (2,)),
        ([1, 2], None, (1, 2)),
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        (2, {"temperature": 0.6}, (2,)),
        (None, {"eos_token_id": 7}, (7,)),
    ],
)
def test_the_generation_config_knows_the_end_ids_best(
    read_fields, in_config, in_generation, expected
):
    assert read_fields(in_generation, eos_token_id=in_config).eos_token_ids == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not s.* LlamaF"),
        ({"architectures": ..., "model_type": "bert"}, "architecture bert is not supported"),
        ({"architectures": ...}, "architecture none named is not supported"),
        ({"vocab_size": ...}, "vocab_size must be a positive whole number, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, not 0"),
        ({"num_attention_heads": 5}, r"hidden_size \(32\) must be divisible by num_attention_h"),
        ({"num_key_value_heads": 3}, r"num_heads \(4\) must be divisible by num_kv_heads \(3\)"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be a positive whole number, not -"),
        ({"head_dim": "8"}, "head_dim must be a positive whole number, not '8'"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings must be a positive whole"),
        ({"eos_token_id": "2"}, "eos_token_id must be a whole number or a list of them, not '2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"hidden_act": ""}, "hidden_act '' is not supported, only silu"),
        ({"rope_scaling": {"type": "xpos", "factor": 4}}, "rope type 'xpos' is not supported; the"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs a positive number factor, n"),
        ({"rope_scaling": {"type": "longrope", "short_factor": "1"}},
         "short_factor must be a list of positive numbers, not '1'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 2]}},
         "longrope needs a factor for each of 4 pairs of dimensions, not 2"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a positive number fac"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 10000 are"),
        ({"architectures": [[]]}, r"architecture \[\] is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, not 'small'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null, not 'linear'"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object or null, not \[1\]"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, not -1"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number, not 'big'"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even for rotary positions"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not"),
    ],
)  # fmt: skip
def test_what_no_llama_can_be_is_refused_by_name(read_fields, changes, message):
    with pytest.raises(UserError, match=rf"^[^ ]*/config\.json: {message}"):
        read_fields(**changes)


@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "e4m3"])  # of MiniMax-M2, of DeepSeek-V3
def test_an_architecture_is_refused_before_its_quantization(read_fields, capsys, fmt):
    quantization = {"quant_method": "fp8", "fmt": fmt, "weight_block_size": [128, 128]}
    with pytest.raises(UserError, match="architecture NewForCausalLM is not supported"):
        read_fields(architectures=["NewForCausalLM"], quantization_config=quantization)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_reads(read, architecture):
    # Of four layers a hybrid has both kinds.
    fields = {"num_hidden_layers": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 0}
    assert read(architecture, **fields, text_config=MINIMAL | fields).vocab_size == 96


@pytest.mark.parametrize(
    "changes, window", [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_mistrals_window(read, changes, window):
    config = read("MistralForCausalLM", **changes)
    assert config.layer_at(2).sliding_window == window
    assert config.head_layer.sliding_window is None
    assert not config.qkv_bias


def test_qwen2_has_biases_of_q_k_v_and_no_window_unless_used(read):
    # A config without architecture is known by its model type.
    assert read("none", architectures=..., model_type="qwen2").qkv_bias
    config = read("Qwen2ForCausalLM", sliding_window=5, max_window_layers=1)
    assert (config.qkv_bias, config.output_bias, config.sliding_window) == (True, False, None)
    windows = {"use_sliding_window": True, "sliding_window": 5}
    config = read("Qwen2ForCausalLM", max_window_layers=1, **windows)
    assert [config.layer_at(i).sliding_window for i in range(3)] == [None, 5, 5]
    # The types of layers win over a count of them.
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read("Qwen3ForCausalLM", layer_types=types, **windows)
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
    changes = {"partial_rotary_factor": 0.75, "max_position_embeddings": 131_072}
    config = read("Phi3ForCausalLM", rope_scaling=scaling, **changes)
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


GEMMA4 = {"num_hidden_layers": 7, "num_attention_heads": 8, "hidden_size_per_layer_input": 0}
WIDE = {"head_dim": 16, "num_key_value_heads": 1}


def test_gemma_4s_full_layers_have_heads_of_their_own(read):
    def heads(architecture="Gemma4ForCausalLM", **changes):
        config = read(architecture, **GEMMA4 | changes)
        layers = [config.layer_at(i) for i in range(7)]
        # The last layer always sees everything.
        assert [layer.sliding_window is None for layer in layers] == [False] * 5 + [True] * 2
        assert layers[5] == layers[6]
        assert (layers[0].rope, layers[0].keys_as_values) == (RopeConfig(), False)
        assert layers[5].rope == RopeConfig(theta=1e6, kind="proportional", share=0.25)
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in (layers[0], layers[5])]
        return *shapes, layers[5].keys_as_values

    # As published, and as transformers writes them from 5.15 on.
    published = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
    assert heads(attention_k_eq_v=True, **published) == ((2, 8), (1, 16), True)
    assert heads(**published) == ((2, 8), (2, 16), False)
    newer = {"per_layer_config": {"5": WIDE, "6": WIDE}, "head_dim": 8}
    assert heads(attention_k_eq_v=True, **newer) == ((2, 8), (1, 16), True)
    assert heads("Gemma4UnifiedForCausalLM") == ((2, 256), (2, 512), False)


def test_a_last_layer_of_gemma_4_that_is_listed_with_a_window_is_told_about(read, capsys):
    config = read("Gemma4ForCausalLM", **GEMMA4, layer_types=["sliding_attention"] * 7)
    assert config.full_attention_layers == (6,)
    assert "the last layer is read as full_attention" in capsys.readouterr().err


def test_end_ids_next_to_gemma_4s_text_are_read_without_a_word(read_fields, capsys):
    text = MINIMAL | GEMMA4 | {"model_type": "gemma4_text", "num_key_value_heads": 2}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    outer |= dict.fromkeys(MINIMAL.keys() - outer, ...) | {"eos_token_id": [1, 50]}
    config = read_fields(**outer, text_config=text)
    assert config.eos_token_ids == (1, 50)
    assert "not read" not in capsys.readouterr().err


@pytest.mark.parametrize("outer, tied", [({}, True), ({"tie_word_embeddings": False}, False)])
def test_mistral_3_is_tied_by_the_outer_config(read_fields, outer, tied):
    text = MINIMAL | {"model_type": "mistral", "num_key_value_heads": 2}
    text |= {"tie_word_embeddings": not tied}
    outer = outer | dict.fromkeys(MINIMAL.keys() - outer, ...)
    outer |= {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    assert read_fields(**outer, text_config=text).tie_word_embeddings is tied


def test_gemma_4s_last_layers_may_read_the_keys_of_earlier_ones(read):
    sharing = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_hidden_layers": 5}
    window, full = "sliding_attention", "full_attention"
    config = read(
        "Gemma4ForCausalLM", **GEMMA4 | sharing, layer_types=[window, window, full, window, full]
    )
    assert [config.layer_of_keys(i) for i in range(5)] == [0, 1, 2, 1, 2]
    layers = [config.layer_at(i) for i in range(5)]
    assert [layer.shares_keys for layer in layers] == [False] * 3 + [True] * 2
    assert [layer.intermediate_size for layer in layers] == [88] * 3 + [176] * 2
    assert (config.head_layer.shares_keys, config.head_layer.intermediate_size) == (False, 88)


@pytest.mark.parametrize(
    "architecture, changes, message",
    [
        *(
            ("Gemma4ForCausalLM", GEMMA4 | changes, message)
            for changes, message in (
                ({"num_kv_shared_layers": 7}, "num_kv_shared_layers must be 0 to 6, not 7"),
                ({"num_kv_shared_layers": 2}, r"layers \(2\) leaves a type of layer without keys"),
                ({"hidden_size_per_layer_input": 8},
                 r"per_layer_input \(262144\) must be vocab_size \(96\)"),
                ({"use_bidirectional_attention": "all"}, "_attention 'all' is not supported"),
                ({"per_layer_config": {"5": WIDE}}, "per_layer_config may override num_key_value"),
                (
                    {"per_layer_config": {"0": {"head_dim": 4}}},
                    "same values in all layers of",
                ),
                ({"per_layer_config": {"7": WIDE}}, 'layers, "0" to "6"'),
                ({"per_layer_config": {"5": 1, "6": 1}}, "must have an object for each"),
                ({"final_logit_softcapping": 0}, "softcapping must be a positive number"),
                ({"rope_scaling": {"type": "yarn"}}, "rope_parameters must name sliding_attention"),
                ({"rope_parameters": {"rope_theta": 1e4}}, "must name sliding_attention and full"),
                ({"per_layer_config": {"5": {"skip": 1}, "6": {"skip": 1}}}, "may override num_k"),
                ({"global_head_dim": 15}, r"head_dim \(15\) must be even"),
                ({"num_key_value_heads": 3}, r"num_heads \(8\) must be divisible by num_kv"),
                ({"enable_moe_block": True}, "top_k_experts must be a positive whole number"),
                ({"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
                 "partial_rotary_factor 0.5 is not supported"),
            )
        ),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a positive whole nu"),
        ("Glm4MoeForCausalLM", {"n_group": 8}, "n_group 8 is not supported, only 1: experts in g"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a w"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must list 3 t"),
        ("Qwen2ForCausalLM", WINDOW | {"layer_types": ["linear"] * 3}, "type 'linear' is not su"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, r"per_tok \(9\) is more than num_lo"),
        *(
            ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": count}, f"or more, not {count}")
            for count in (None, -1, 1.5)
        ),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_alpha 1.702 and swiglu_limit 5.0 are"),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "num_experts must be a positive whole number"),
        ("Qwen3VLMoeForConditionalGeneration", {"text_config": {"norm_topk_prob": False}},
         "norm_topk_prob must be true, as transformers computes Qwen3-VL"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "_attention is not suppor"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "softcapping must be a positive numb"),
        ("Gemma3ForConditionalGeneration", {"text_config": None}, "text_config must be an object"),
        ("LlamaForCausalLM", {"architectures": "Llama"},
         "architectures must be a list, not 'Llama'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(read, architecture, changes, message):
    with pytest.raises(UserError, match=message):
        read(architecture, **changes)
