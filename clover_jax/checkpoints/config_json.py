"""config.json of a folder: the type of every field is checked, and unknown fields are named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError
from clover_jax.runtime.files import read_json_object
from clover_jax.runtime.progress import say

MOST = 2**31 - 1  # a larger number is a mistake, and overflows somewhere
# Fields by their type, also within other fields; null stands for a field that is not there. Counts
# of parts and rows are checked where they are read, with what they may be.
_KINDS: dict[str, str] = {
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "model_type", "rope_type", "speculators_model_type"),
        "text",
    ),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "qkv_bias", "bias", "fusion_bias", "medusa_fc_bias")
        + ("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "truncate")
        + ("norm_before_residual", "original_lm_head", "attention_k_eq_v", "enable_moe_block")
        + ("use_double_wide_mlp",),
        "true or false",
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters", "quantization_config", "text_config")
        + ("eagle_config", "transformer_layer_config", "sliding_attention", "full_attention")
        + ("per_layer_config",),
        "an object or null",
    ),
    **dict.fromkeys(
        ("bos_token_id", "original_max_position_embeddings", "model_max_length")
        + ("sliding_window_pattern", "truncated_vocab_size"),
        "a whole number",
    ),
    **dict.fromkeys(
        ("mscale", "mscale_all_dim", "rope_local_base_freq", "swiglu_alpha", "swiglu_limit"),
        "a number",
    ),
    **dict.fromkeys(("mlp_only_layers", "architectures", "layer_types"), "a list"),
}
# Fields that transformers reads although its configs no longer have them.
_OLDER_FIELDS = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"} | {
    *("original_max_position_embeddings", "sliding_window_pattern", "head_dim", "pretraining_tp"),
    *("torch_dtype", "quantization_config", "auto_map", "tokenizer_class"),
    *("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    *("bos_token_id", "eos_token_id"),
}
# Fields of published configs that we read under names that transformers' configs do not have.
_OF_HYBRIDS = frozenset(
    ("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
)
_OUR_FIELDS = {
    "qwen3_moe": frozenset(("num_experts",)),
    "qwen3_vl_moe_text": frozenset(("num_experts", "norm_topk_prob")),
}
_OUR_FIELDS |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _OF_HYBRIDS)
# Objects that describe the rotation, the one that wins first, and what they may hold.
_ROPES = ("rope_scaling", "rope_parameters")
_ROPE_FIELDS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "truncate"),
        *("mscale", "mscale_all_dim", "mrope_section", "mrope_interleaved"),
        *("full_attention", "sliding_attention"),
    )
)


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of config.json; raises UserError for one of a wrong type."""
    values = read_json_object(path)
    _check(values, path, "")
    return values


def _check(values: Mapping[str, Any], path: Path, within: str) -> None:
    for name, value in values.items():
        kind = _KINDS.get(name)
        if value is not None and kind is not None and not _is(value, kind):
            raise UserError(f"{path}: {within}{name} must be {kind}, not {_shown(value)}")
        # Other programs' objects may hold anything under these names.
        if isinstance(value, dict) and kind is not None and name != "quantization_config":
            _check(value, path, f"{within}{name}.")


def tell_unknown(
    values: Mapping[str, Any],
    path: Path,
    kind: str | None,
    further: Mapping[str, Set[str] | None] | None = None,
) -> None:
    """Name, with their number, the fields that transformers does not know for a type of model.

    kind: a `model_type`; nothing is said for one that transformers does not know.
    further: fields that a layout of heads adds, each with the fields of its object, or None for
        one whose content is not looked into.
    """
    # Set before transformers is imported, which then does not warn that torch is absent.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING

    # The first Baichuan came with code of its own.
    if not kind or kind not in CONFIG_MAPPING:
        return
    objects = {**dict.fromkeys(_ROPES, _ROPE_FIELDS), **(further or {})}
    ours = _OUR_FIELDS.get(kind, frozenset())
    known = CONFIG_MAPPING[kind]().to_dict().keys() | _OLDER_FIELDS | ours | objects.keys()
    # As everywhere, null stands for a field that is not there.
    unknown = [name for name, x in values.items() if x is not None and name not in known]
    for outer, fields in objects.items():
        if fields is not None and isinstance(values.get(outer), dict):
            unknown += [f"{outer}.{name}" for name in values[outer] if name not in fields]
    if unknown:
        names = ", ".join(sorted(unknown))
        number = f"{len(unknown)} field{'s' if len(unknown) > 1 else ''}"
        say(f"{path}: {number} not read, unknown for {kind}: {names}")

    # The readers of rotations believe the first object, and an object before what lies outside.
    ropes = [values[name] for name in _ROPES if values.get(name)]
    if len(ropes) > 1 and ropes[0] != ropes[1]:
        say(f"{path}: rope_scaling and rope_parameters differ; rope_scaling is read")
    for name in ("rope_theta", "partial_rotary_factor"):
        one, other = values.get(name), ropes[0].get(name) if ropes else None
        if None not in (one, other) and one != other:
            say(f"{path}: {name} is {one}, but {other} within the rotation, which is read")


def _is(value: Any, kind: str) -> bool:
    # JSON's true is an int in Python.
    if kind == "true or false":
        return isinstance(value, bool) or value in (0, 1)
    if kind == "a whole number":
        return type(value) is int and abs(value) <= MOST
    if kind == "a number":
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
    types: dict[str, type] = {"text": str, "an object or null": dict, "a list": list}
    return isinstance(value, types[kind])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
