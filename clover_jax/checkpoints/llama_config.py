"""The fields of a Llama config.json, read into our `BaseConfig`; other families start from them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.config_json import MOST
from clover_jax.config import BaseConfig, RopeConfig
from clover_jax.errors import UserError

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "dynamic")
ORIGINAL = "original_max_position_embeddings"
SLIDING, FULL = "sliding_attention", "full_attention"  # in `layer_types`
_SHARED = ("rope_theta", "partial_rotary_factor")
# Required fields of each type.
_ROPE_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
MOST_LAYERS = 10_000  # a larger number is a mistake, and would take all memory before it is found


def parse_llama_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Llama config into ours; `path` is for the error messages.

    Defaults are transformers', except that shapes are required; null counts as absent.
    """
    # Checked by name first: a config may hold anything.
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"):
        check_count(values, name, path)
    check_count(values, "num_hidden_layers", path, MOST_LAYERS)
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        if values.get(name) is not None:
            check_count(values, name, path)
    activation = "silu" if values.get("hidden_act") is None else values["hidden_act"]
    if activation not in ACTIVATIONS:
        raise UserError(
            f"{path}: hidden_act {activation!r} is not supported, only {', '.join(ACTIVATIONS)}"
        )
    # Of a base these fields were read and taken out; quantized draft heads are not read.
    if values.get("quantization_config"):
        raise UserError(
            f"{path}: a quantized draft head cannot be read; use the original checkpoint"
        )

    # Llama has one field for all four projections of the attention.
    bias = bool(values.get("attention_bias", False))
    heads = values["num_attention_heads"]
    head_dim, width = values.get("head_dim"), values["hidden_size"]
    if not head_dim and width % heads:
        raise UserError(
            f"{path}: hidden_size ({width}) must be divisible by num_attention_heads ({heads}) "
            "when head_dim is not given"
        )
    rope = parse_rope(values, path)
    # Only these families are known to leave a part of each head unrotated.
    if values.get("model_type") not in ("phi3", "qwen3_next", "glm4"):
        refuse_share(rope, path)
    eps, eos = positive(values, "rms_norm_eps", 1e-6, path), eos_ids(values, path)
    # Beyond its original length longrope rotates all keys by its long factors, also those in the
    # cache: texts are limited to that length.
    context = values.get("max_position_embeddings") or 2048
    if rope.kind == "longrope":
        context = rope.original_max_position_embeddings
    try:
        return BaseConfig(
            vocab_size=values["vocab_size"],
            hidden_size=width,
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=head_dim or width // heads,
            rms_norm_eps=eps,
            rope=rope,
            max_position_embeddings=context,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(values.get("mlp_bias", False)),
            activation=ACTIVATIONS[activation],
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=eos or (),
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from error


def refuse_share(rope: RopeConfig, path: Path) -> None:
    """Raise UserError for a part of each head that stays, unless its kind of rotation says so."""
    if rope.share != 1 and rope.kind != "proportional":
        raise UserError(f"{path}: partial_rotary_factor {rope.share} is not supported, only 1")


def check_count(values: dict[str, Any], name: str, path: Path, most: int | None = None) -> None:
    """Raise UserError for a field that is not a positive whole number, or more than `most`."""
    count = values.get(name)
    # JSON's true is an int in Python.
    if type(count) is not int or count < 1:
        raise UserError(f"{path}: {name} must be a positive whole number, not {count!r}")
    if count > (MOST if most is None else most):
        raise UserError(f"{path}: {name} is {count!r:.20}; at most {most or MOST} are possible")


def parse_rope(values: dict[str, Any], path: Path) -> RopeConfig:
    """Read the rotary fields: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Dynamic scaling begins beyond the context's length, where every token changes the rotation of
    all keys, which no cache can follow. Within that length it changes nothing.
    """
    fields = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(fields, dict):
        raise UserError(f"{path}: rope_scaling must be an object or null, not {fields!r}")
    # The older object calls it `type`.
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UserError(
            f"{path}: rope type {kind!r} is not supported; the types are {', '.join(ROPE_KINDS)}"
        )

    # The newer object holds theta and share too; where it does not, the older fields apply.
    merged = values | {name: fields[name] for name in _SHARED if fields.get(name) is not None}
    theta = float(positive(merged, "rope_theta", 10_000.0, path))
    share = float(positive(merged, "partial_rotary_factor", 1.0, path))
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta, share=share)
    if kind == "longrope":
        return RopeConfig(theta=theta, share=share, kind=kind, **_longrope(fields, values, path))

    if kind == "proportional":
        factor = float(positive(fields, "factor", 1.0, path))
        return RopeConfig(theta=theta, share=share, kind=kind, factor=factor)

    # Required fields, then those with a default.
    for name in _ROPE_FIELDS[kind]:
        if not _is_positive(fields.get(name)):
            raise UserError(
                f"{path}: rope type {kind!r} needs a positive number {name}, not "
                f"{fields.get(name)!r}"
            )
    scaling: dict[str, Any] = {name: float(fields[name]) for name in _ROPE_FIELDS[kind]}
    if kind != "linear":
        scaling[ORIGINAL] = _original_length(fields, values, path)
    if kind == "yarn":
        scaling |= _yarn(fields, path)
    return RopeConfig(theta=theta, share=share, kind=kind, **scaling)


def _original_length(fields: dict[str, Any], values: dict[str, Any], path: Path) -> int:
    # Phi has it outside, which then counts; without it the context's length is taken.
    length = values.get(ORIGINAL) or fields.get(ORIGINAL)
    length = length or values.get("max_position_embeddings") or 2048
    # Its logarithm divides.
    if length < 2:
        raise UserError(f"{path}: {ORIGINAL} must be 2 tokens or more, not {length}")
    return length


def _yarn(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return which pairs are blended, and the factor of queries and keys."""

    # YaRN's sqrt(1 / t) = 0.1 ln(s) + 1, for texts s times as long.
    def longer(weight: float) -> float:
        return 0.1 * weight * math.log(fields["factor"]) + 1.0 if fields["factor"] > 1 else 1.0

    # The paper's rule, or DeepSeek's with weights of its own.
    attention = longer(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        attention = longer(fields["mscale"]) / longer(fields["mscale_all_dim"])
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": attention}
    numbers = {name: float(positive(fields, name, x, path)) for name, x in defaults.items()}
    return numbers | {"truncate": bool(fields.get("truncate", True))}


def _longrope(fields: dict[str, Any], values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the rotation by the short factors; the context is kept to where they hold."""
    short = fields.get("short_factor")
    if not isinstance(short, list) or not all(map(_is_positive, short)):
        raise UserError(f"{path}: short_factor must be a list of positive numbers, not {short!r}")

    # How much longer texts may be decides how much attention is sharpened in all of them.
    original = _original_length(fields, values, path)
    longer = (values.get("max_position_embeddings") or 2048) / original
    factor = positive(fields, "factor", longer, path)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "pair_factors": tuple(map(float, short)),
        ORIGINAL: original,
        "attention_factor": float(positive(fields, "attention_factor", attention, path)),
    }


def positive(values: dict[str, Any], name: str, default: float, path: Path) -> float:
    """Return a field, or the default for null; raises UserError unless it is a positive number."""
    # Exports write null for unset fields.
    value = default if values.get(name) is None else values[name]
    if not _is_positive(value):
        raise UserError(f"{path}: {name} must be a positive number, not {value!r}")
    return value


def read_window(values: dict[str, Any], path: Path) -> int | None:
    """Return `sliding_window`, None where there is none; raises UserError for a wrong one."""
    if values.get("sliding_window") is not None:
        check_count(values, "sliding_window", path)
    return values.get("sliding_window")


def read_full_layers(
    values: dict[str, Any],
    default: Iterable[int],
    path: Path,
    known: tuple[str, ...] = (SLIDING, FULL),
) -> tuple[int, ...]:
    """Return the layers that see everything, by `layer_types`; `default` where there is none.

    known: the types that the family has.
    """
    num_layers, types = values["num_hidden_layers"], values.get("layer_types")
    if types is None:
        return tuple(default)
    if not isinstance(types, list) or len(types) != num_layers:
        raise UserError(f"{path}: layer_types must list {num_layers} types, one a layer")
    # Other types (linear attention, chunks) are other computations.
    for kind in types:
        if kind not in known:
            raise UserError(
                f"{path}: layer type {kind!r} is not supported, only {' and '.join(known)}"
            )
    return tuple(index for index, kind in enumerate(types) if kind == FULL)


def _is_positive(value: Any) -> bool:
    # A comparison, since `math.isfinite` fails on huge integers; it is false for NaN.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def eos_ids(values: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    """Return the end-of-sequence ids that a config names; None where it does not."""
    ids = values.get("eos_token_id")
    if ids is None:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    if not all(type(each) is int for each in listed):
        raise UserError(
            f"{path}: eos_token_id must be a whole number or a list of them, not {ids!r}"
        )
    return tuple(listed)
