"""EAGLE-1 heads with the config of vLLM's speculators; the tensors are the official ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle import EagleConfig
from clover_jax.errors import UserError
from clover_jax.interchange import eagle
from clover_jax.interchange.layout import Layout
from clover_jax.json_files import read_json_object
from clover_jax.models.base import BaseModel

VERSION = "0.1.0"
DRAFTED_TOKENS = 5  # what a server drafts unless it is told otherwise


def read_config(directory: Path, rope_theta: float | None, base: BaseConfig) -> EagleConfig:
    """Read the head's config out of `transformer_layer_config`.

    Raises UserError for another algorithm than EAGLE-1.
    """
    path = directory / "config.json"
    values = read_json_object(path)
    algorithm = values.get("speculators_model_type")
    if algorithm != "eagle":
        raise UserError(
            f"{path}: speculators_model_type {algorithm!r} cannot be read, only 'eagle'"
        )
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{path} has no transformer_layer_config object")
    fields = layer | {"bias": values.get("fusion_bias", False)}
    return eagle.parse_config(fields, path, rope_theta)


def config_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    """Return what config.json holds for a head of a base."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_version": VERSION,
        "draft_vocab_size": config.vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": config.layer.hidden_size,
        "eagle_aux_hidden_state_layer_ids": None,
        "layernorms": False,
        "fusion_bias": config.fc_bias,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": eagle.config_fields(config, base.config),
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base.source, "architectures": ["LlamaForCausalLM"]},
        },
    }


LAYOUT = Layout(
    name="speculators",
    kind="eagle",
    read_config=read_config,
    leaves=eagle.eagle_leaves,
    config_fields=config_fields,
    check_exportable=eagle.check_exportable,
    copies={eagle.EMBEDDING: "embedding"},
)
