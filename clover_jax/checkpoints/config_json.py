"""config.json of a folder, with the type of every field checked before anything reads its value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError
from clover_jax.runtime.files import read_json_object

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
        + ("norm_before_residual", "original_lm_head"),
        "true or false",
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters", "quantization_config", "text_config")
        + ("eagle_config", "transformer_layer_config", "sliding_attention", "full_attention"),
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
    "mlp_only_layers": "a list",
}


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
