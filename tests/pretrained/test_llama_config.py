"""A Hugging Face config.json says what the decoder must be; what it cannot be is refused."""

import json
import math

import pytest

from clover_jax.config import RopeConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.families import read_base_config

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def read(tmp_path):
    """A function that writes a config.json with changes (and a generation config) and reads it."""

    def read(generation=None, **changes):
        values = {k: v for k, v in (MINIMAL | changes).items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_base_config(tmp_path)

    return read


def test_defaults_are_those_of_transformers(read):
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert config.max_position_embeddings == 2048
    assert not config.tie_word_embeddings
    assert not config.qkv_bias
    assert not config.mlp_bias
    assert config.eos_token_ids == ()


def test_given_shapes_and_biases_are_kept(read):
    config = read(num_key_value_heads=2, head_dim=16, attention_bias=True, mlp_bias=True)
    assert (config.num_kv_heads, config.head_dim) == (2, 16)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}},
            RopeConfig(kind="linear", factor=4.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
            RopeConfig(kind="linear", factor=4.0),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, RopeConfig()),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
            RopeConfig(
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                attention_factor=0.1 * math.log(4) + 1,
            ),
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1, 1.5, 2, 3],
                    "original_max_position_embeddings": 32,
                },
            },
            RopeConfig(
                kind="longrope",
                pair_factors=(1.0, 1.5, 2.0, 3.0),
                original_max_position_embeddings=32,
                attention_factor=math.sqrt(1 + math.log(4) / math.log(32)),
            ),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", **LLAMA3),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", **LLAMA3),
        ),
    ],
)
def test_rope_in_old_and_new_fields(read, fields, expected):
    assert read(**fields).rope == expected


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
def test_the_generation_config_knows_the_end_ids_best(read, in_config, in_generation, expected):
    assert read(in_generation, eos_token_id=in_config).eos_token_ids == expected


def test_null_is_as_absent(read):
    assert read(max_position_embeddings=None).max_position_embeddings == 2048
    assert read(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; the supported ones are LlamaForCausal",
        ),
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
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"rope_scaling": {"type": "xpos", "factor": 4}}, "rope type 'xpos' is not supported; the"),
        (
            {"rope_scaling": {"type": "yarn"}},
            "rope type 'yarn' needs a positive number factor, not None",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": "1"}},
            "short_factor must be a list of positive numbers, not '1'",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 2]}},
            "longrope needs a factor for each of 4 pairs of dimensions, not 2",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope type 'linear' needs a positive number fac",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 10000 are"),
        ({"architectures": [[]]}, r"architecture \[\] is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, not 'small'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null, not 'linear'"),
        ({"rope_parameters": [1]}, r"rope_scaling must be an object or null, not \[1\]"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, not -1"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number, not 'big'"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even for rotary positions"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not"),
    ],
)
def test_what_cannot_be_is_refused_by_name(read, changes, message):
    with pytest.raises(UserError, match=rf"^[^ ]*/config\.json: {message}"):
        read(**changes)
