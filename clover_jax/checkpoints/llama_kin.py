"""Families that differ from Llama in a few fields.

Mistral has no biases, and every layer looks back over a sliding window. Qwen2 and 2.5 have biases
of q, k and v, Qwen3 norms of q and k; either may have a window in some of its layers. Phi-3 and
Phi-4 store q, k and v in one matrix, gate and up in another. Baichuan stores q, k and v in one; its
7B models rotate, the 13B ones use ALiBi, and Baichuan 2 divides each row of lm_head by its length
at every use, which is done here once, when it is loaded.

Every fourth layer of SmolLM3 does not rotate. Granite multiplies embeddings, scores and what each
layer adds by numbers of its config, and divides logits by one: the last two are multiplied into the
matrices and the final norm when they are read. Of Qwen3-VL the text model is read, a Qwen3: for
text-only input M-RoPE reduces to RoPE.

Gemma 2 and 3 norm the outputs of attention and MLP, scale embeddings by the square root of the
width, gate with GELU, and alternate layers with and without a window; their norms are stored as w
for 1 + w. Gemma 2 caps scores and logits softly; Gemma 3 norms queries and keys, and rotates layers
with a window with another base. OLMo 2 and 3 norm these outputs only, and all heads' queries or
keys together; three of four layers of OLMo 3 have a window, and rotary scaling concerns the others.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.llama_config import (
    FULL,
    SLIDING,
    check_count,
    parse_llama_config,
    parse_rope,
    positive,
    read_full_layers,
    read_window,
)
from clover_jax.checkpoints.llama_tensors import Family, base_leaves, packed_leaves, renamed
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError

# Defaults of transformers' configs for absent fields.
MISTRAL_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
QWEN_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
PHI3_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
}
BAICHUAN_LENGTH, WIDTH_OF_13B, VOCABULARY_OF_2 = 4096, 5120, 125_696
# Llama's fields that turn biases on, which mean nothing in these families.
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}


def parse_mistral_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Mistral config into ours."""
    values = MISTRAL_DEFAULTS | values | _NO_BIASES
    return _with_window(parse_llama_config(values, path), values, 0, path)


def parse_qwen2_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen2 config into ours: no field names the biases, which are there."""
    config = _parse_qwen(QWEN_DEFAULTS | values | _NO_BIASES, path)
    return dataclasses.replace(config, qkv_bias=True)


def parse_qwen3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen3 config into ours."""
    values = QWEN_DEFAULTS | {"head_dim": 128} | values | {"mlp_bias": False}
    return dataclasses.replace(_parse_qwen(values, path), query_key_norm=True)


def _parse_qwen(values: dict[str, Any], path: Path) -> BaseConfig:
    config = parse_llama_config(values, path)
    # These configs name a window even where it is not used.
    if not values.get("use_sliding_window"):
        return config
    # Newer configs list the kind of each layer, and need no count.
    num_full = values["max_window_layers"]
    is_count = isinstance(num_full, int) and num_full >= 0
    if values.get("layer_types") is None and not is_count:
        raise UserError(
            f"{path}: max_window_layers must be a whole number, 0 or more, not {num_full!r}"
        )
    return _with_window(config, values, num_full if is_count else 0, path)


def _with_window(
    config: BaseConfig, values: dict[str, Any], num_full: int, path: Path
) -> BaseConfig:
    """Return a config with the window, which the first `num_full` layers do not have."""
    first = range(config.num_layers)[:num_full]
    return dataclasses.replace(
        config,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, first, path),
    )


def parse_phi3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Phi-3 config into ours: no biases, a window in every layer or none."""
    values = PHI3_DEFAULTS | values | _NO_BIASES | {"model_type": "phi3"}
    # The first versions call longrope "su" or "yarn", which here is not YaRN.
    for name in ("rope_scaling", "rope_parameters"):
        fields = values.get(name)
        if isinstance(fields, dict) and fields.get("rope_type", fields.get("type")) in (
            "su",
            "yarn",
        ):
            values[name] = fields | {"rope_type": "longrope"}
    config = parse_llama_config(values, path)
    return dataclasses.replace(config, sliding_window=read_window(values, path))


def parse_baichuan_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Baichuan config into ours: no biases and no grouped heads."""
    # 7B and 13B share an architecture name, and only 7B's configs have a rotary length.
    is_first_7b = "BaiChuanForCausalLM" in (values.get("architectures") or [])
    has_length = "max_position_embeddings" in values
    alibi = not is_first_7b and (not has_length or values["hidden_size"] == WIDTH_OF_13B)
    # The first versions call the context's length by another name.
    length = {"max_position_embeddings": values.get("model_max_length", BAICHUAN_LENGTH)}
    fixed = _NO_BIASES | {"num_key_value_heads": None}
    return dataclasses.replace(parse_llama_config(length | values | fixed, path), alibi=alibi)


def adjust_baichuan(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Normalize lm_head where the checkpoint is one of Baichuan 2."""
    # The config has no version; these two fields are new in the second.
    is_second = values.get("vocab_size") == VOCABULARY_OF_2 or "z_loss_weight" in values
    if not is_second or name != "lm_head.weight":
        return tensor
    # In float32: a sum of thousands of bfloat16 squares is inexact.
    rows = tensor.astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)  # torch's own bound
    return rows


SMOLLM3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "no_rope_layer_interval": 4,
}
GRANITE_MULTIPLIERS = (
    *("embedding_multiplier", "attention_multiplier"),
    *("residual_multiplier", "logits_scaling"),
)


def parse_smollm3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a SmolLM3 config into ours; `no_rope_layers` has 0 for no rotation."""
    values = SMOLLM3_DEFAULTS | values
    config, count = parse_llama_config(values, path), values["num_hidden_layers"]
    check_count(values, "no_rope_layer_interval", path)
    every, rotated = values["no_rope_layer_interval"], values.get("no_rope_layers")
    if rotated is None:
        rotated = [int((index + 1) % every != 0) for index in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or not set(rotated) <= {0, 1}:
        raise UserError(
            f"{path}: no_rope_layers must list {count} numbers, 1 for a layer that rotates and 0 "
            f"for one that does not, not {rotated!r}"
        )
    unrotated = tuple(index for index in range(count) if not rotated[index])
    config = dataclasses.replace(config, unrotated_layers=unrotated)
    if not values.get("use_sliding_window"):
        return config
    # The layers that do not rotate have the window, unless `layer_types` says otherwise.
    full = read_full_layers(values, (i for i in range(count) if i not in unrotated), path)
    return dataclasses.replace(
        config, sliding_window=read_window(values, path), full_attention_layers=full
    )


def parse_granite_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Granite config into ours."""
    embedding, attention, *_ = (positive(values, name, 1.0, path) for name in GRANITE_MULTIPLIERS)
    config = parse_llama_config(values, path)
    return dataclasses.replace(config, embedding_scale=embedding, score_scale=attention)


def adjust_granite(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Multiply what a layer adds, and divide the state that logits are computed from."""
    if name == "model.norm.weight":
        factor = 1 / (values.get("logits_scaling") or 1.0)
    elif "o_proj." in name or "down_proj." in name:
        factor = values.get("residual_multiplier") or 1.0
    else:
        return tensor
    return tensor.astype(np.float32) * np.float32(factor)


def text_fields(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of the text part of a config that also reads images."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{path}: text_config must be an object, not {text!r}")
    # Special tokens may be named outside, for both parts; fields of text_config win.
    outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
    return {name: values[name] for name in outer if values.get(name) is not None} | text


def beside_images(text: Family, ignored: str) -> Family:
    """Return the family of models that read images too: its text is one part of each."""

    def moved(name: str) -> str:
        return re.sub(r"^model\.", "model.language_model.", name)

    alternative = text.alternative
    return dataclasses.replace(
        text,
        parse=lambda values, path: text.parse(text_fields(values, path), path),
        leaves=lambda config: renamed(text.leaves(config), moved),
        ignored=ignored,
        alternative=alternative and (lambda config: renamed(alternative(config), moved)),
    )


def parse_mistral3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Mistral 3 config into ours: the outer one says what is tied."""
    tied = {"tie_word_embeddings": values.get("tie_word_embeddings", True)}
    return parse_mistral_config(text_fields(values, path) | tied, path)


GRANITE = Family(parse_granite_config, adjust=adjust_granite)
QWEN3 = Family(parse_qwen3_config)
QWEN3_VL = beside_images(QWEN3, r"model\.visual\..*")
MISTRAL = Family(parse_mistral_config)
# The text of a whole model in the older order of names, and the parts for images.
_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
_NAMED_FIRST = functools.partial(base_leaves, prefix="language_model.")
MISTRAL3 = dataclasses.replace(
    beside_images(MISTRAL, _IMAGES), parse=parse_mistral3_config, leaves=_NAMED_FIRST
)
PHI3 = Family(
    parse_phi3_config,
    functools.partial(packed_leaves, names={"qkv": "qkv_proj", "gate_up": "gate_up_proj"}),
)
BAICHUAN = Family(
    parse_baichuan_config,
    functools.partial(packed_leaves, names={"qkv": "W_pack"}),
    adjust_baichuan,
)


# Defaults of transformers' configs for absent fields; published ones of Gemma 3 leave out many.
GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
# Gemma 3 has no caps: its queries and keys are normed instead.
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
# Default rotary bases of Gemma 3: for layers without a window, and for those with one.
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def parse_gemma3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Gemma 3 text config into ours: every sixth layer sees everything."""
    values = GEMMA3_DEFAULTS | values
    # The newer object has a rotation for each type of layer, the older fields one for both.
    newer = values.get("rope_parameters") or {}
    rotation = newer.get(FULL) or {}
    local = {"rope_theta": values.get("rope_local_base_freq") or LOCAL_THETA}
    values |= {
        "rope_theta": values.get("rope_theta") or GLOBAL_THETA,
        "rope_parameters": rotation,
    }

    # The period of the layers without a window; newer configs list the types instead.
    every = values.get("sliding_window_pattern") or 6
    config = _parse_gemma(values, path, every)
    # Scaling for long texts concerns the layers that see them.
    local_rope = parse_rope(local | {"rope_parameters": newer.get(SLIDING)}, path)
    return dataclasses.replace(config, query_key_norm=True, local_rope=local_rope)


def _parse_gemma(values: dict[str, Any], path: Path, every: int) -> BaseConfig:
    if values.get("use_bidirectional_attention"):
        raise UserError(f"{path}: use_bidirectional_attention is not supported: text is causal")
    # Gemma names the activation's field differently, and its MLP never has biases.
    llama = values | {"hidden_act": values["hidden_activation"], "mlp_bias": False}
    config = parse_llama_config(llama, path)

    def cap(name: str) -> float | None:
        return None if values[name] is None else float(positive(values, name, 0.0, path))

    # Published configs state the period of the layers that see everything, or list the types.
    full = range(every - 1, config.num_layers, every)
    return dataclasses.replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        score_scale=positive(values, "query_pre_attn_scalar", 256, path) ** -0.5,
        score_cap=cap("attn_logit_softcapping"),
        logit_cap=cap("final_logit_softcapping"),
        post_norms=True,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, full, path),
    )


def adjust_gemma(values: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Return a norm's scale 1 + w in float32, which bfloat16 rounds when it is placed."""
    # All norms' names end like this, including the norms of queries and keys.
    return tensor.astype(np.float32) + 1 if name.endswith("norm.weight") else tensor


# Every second layer of Gemma 2 sees everything.
GEMMA2 = Family(
    lambda values, path: _parse_gemma(GEMMA2_DEFAULTS | values, path, every=2), adjust=adjust_gemma
)
GEMMA3 = Family(parse_gemma3_config, adjust=adjust_gemma)
GEMMA3_MULTIMODAL = dataclasses.replace(beside_images(GEMMA3, _IMAGES), leaves=_NAMED_FIRST)


OLMO2_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50_279, "mlp_bias": False}
OLMO3_DEFAULTS = OLMO2_DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096}


def parse_olmo2_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of an OLMo 2 config into ours."""
    config = parse_llama_config(OLMO2_DEFAULTS | values | {"mlp_bias": False}, path)
    return dataclasses.replace(config, pre_norms=False, post_norms=True, joint_head_norm=True)


def parse_olmo3_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of an OLMo 3 config into ours: every fourth layer sees everything."""
    values = OLMO3_DEFAULTS | values
    # The newer object has a rotation for each type of layer, the older fields scale one of them.
    newer = values.get("rope_parameters") or {}
    rotation = newer.get(FULL, {} if SLIDING in newer else newer)
    theta = {"rope_theta": values["rope_theta"]}
    config = parse_olmo2_config(values | {"rope_parameters": rotation}, path)
    full = range(3, config.num_layers, 4)
    return dataclasses.replace(
        config,
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, full, path),
        local_rope=parse_rope(theta | {"rope_parameters": newer.get(SLIDING)}, path),
    )


OLMO2 = Family(parse_olmo2_config)
OLMO3 = Family(parse_olmo3_config)
