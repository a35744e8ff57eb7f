"""EAGLE heads in the layout of vLLM's speculators: a config of their own, and official tensors.

Sources: the speculators library's schema and vLLM's reader. EAGLE-3's layer is called `layers.0.`
here, not `midlayer.`, and the base's embedding is stored with it. `norm_before_residual` is always
written: without it vLLM takes true and the schema false. Our heads, like the method's own, add to
the state as it was before its norm. A state that a head reads has the id of the layer that it
enters; vLLM 0.32.0 also offers the state after the last layer, under the id `num_layers`, which
short bases need. EAGLE-1 heads were in the library's first version only; eagle.py has the layout
that vLLM reads today.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.eagle import (
    EMBEDDING,
    KEPT,
    NORM_FIRST,
    OFFSETS,
    STATES,
    all_states,
    check_eagle,
    eagle1_fields,
    eagle3_leaves,
    eagle_leaves,
    parse_eagle,
    parse_eagle3,
    vocabulary_tensors,
)
from clover_jax.checkpoints.layout import Layout, check_llama_layer, eagle_fields
from clover_jax.checkpoints.loading import architecture_of
from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle import EagleConfig
from clover_jax.drafters.eagle3 import NUM_FEATURES, Eagle3Config
from clover_jax.errors import UserError
from clover_jax.runtime.files import read_json_object

VERSION = "0.1.0"
DRAFTED_TOKENS = 5  # a server's default number of tokens to draft with an EAGLE-1 head
_ALGORITHM, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"


def _parse_eagle(values: dict[str, Any], path: Path, base: BaseConfig) -> EagleConfig:
    # The bias of fc has another name here.
    fields = _layer_config(values, path) | {"bias": values.get("fusion_bias", False)}
    return parse_eagle(fields, path, base)


def _parse_eagle3(values: dict[str, Any], path: Path, base: BaseConfig) -> Eagle3Config:
    layer = _layer_config(values, path)
    # Absent means true to vLLM and false to the schema, so only a written false is certain.
    if values.get(NORM_FIRST) is not False:
        raise UserError(
            f"{path}: {NORM_FIRST} is {values.get(NORM_FIRST, 'missing')}; only heads with false "
            "can be read, which add to the state as it was before its norm"
        )
    # EAGLE-3's own reader looks for the size among the fields of the layer.
    fields = layer | {"draft_vocab_size": values.get("draft_vocab_size")}
    config = parse_eagle3(fields, path, base)
    ids = values.get(STATES)
    if not ids:  # to vLLM a config without them, or with an empty list, means the method's own
        return config

    # An id that is not a state of this base shows that the head belongs to another one.
    names = all_states(base)
    if not _are_states(ids) or not set(ids) <= set(range(len(names))):
        raise UserError(
            f"{path}: {STATES} must be {NUM_FEATURES} different ids from 0 to {base.num_layers}, "
            f"the number of the base's layers, in ascending order, not {ids!r}"
        )
    return dataclasses.replace(config, features=tuple(names[index] for index in ids))


def _layer_config(values: dict[str, Any], path: Path) -> dict[str, Any]:
    # The library has other algorithms, whose heads have nothing in common with these.
    algorithm = values[_ALGORITHM]
    if algorithm not in ("eagle", "eagle3"):
        raise UserError(
            f"{path}: {_ALGORITHM} {algorithm!r} cannot be read, only 'eagle' and 'eagle3'"
        )
    if not isinstance(values.get(_LAYER_CONFIG), dict):
        raise UserError(f"{path} has no {_LAYER_CONFIG} object")
    return values[_LAYER_CONFIG]


def _are_states(ids: Any) -> bool:
    # vLLM returns states while it runs the layers: each once, in their order.
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        return False
    return len(ids) == NUM_FEATURES and ids == sorted(set(ids))


def _fields(config: EagleConfig | Eagle3Config, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for a head of a base."""
    algorithm, drafted_tokens = config.kind, DRAFTED_TOKENS
    if isinstance(config, Eagle3Config):
        drafted_tokens = config.num_positions
        own = {
            "architectures": ["Eagle3Speculator"],
            STATES: _state_ids(config, base.config),
            _LAYER_CONFIG: eagle_fields(config, base.config, "LlamaForCausalLM"),
        }
    else:
        own = {
            "architectures": ["EagleSpeculator"],
            # Only EAGLE-3 heads have ids of states; this head reads the base's last state.
            STATES: None,
            "layernorms": False,
            "fusion_bias": config.fc_bias,
            "transformer_layer_architecture": "LlamaDecoderLayer",
            _LAYER_CONFIG: eagle1_fields(config, base),
        }

    # Defaults of a server, which its user can override.
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    # vLLM loads the base named here where a user names the head alone.
    path = base.directory / "config.json"
    architecture = architecture_of(read_json_object(path), path)
    return {
        _ALGORITHM: algorithm,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        NORM_FIRST: False,
        "target_hidden_size": config.layer.hidden_size,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base.source, "architectures": [architecture]},
        },
    } | own


def _check_eagle3(config: Eagle3Config, base: BaseConfig) -> None:
    check_llama_layer(config.layer)
    # Called for its error, before anything is written.
    _state_ids(config, base)
    # vLLM does not know our own field for biases of q, k and v alone.
    if config.layer.qkv_bias != config.layer.output_bias:
        raise UserError(
            f"this head's layer has qkv_bias {config.layer.qkv_bias} and output_bias "
            f"{config.layer.output_bias}, but vLLM's has one attention_bias for both; train with "
            "--drafter_options=llama_layer=true to export it"
        )


def _state_ids(config: Eagle3Config, base: BaseConfig) -> list[int]:
    # Two features may be the same state in a base of two layers.
    names = all_states(base)
    read = [names.index(name) for name in config.features if name in names]
    if not _are_states(read):
        raise UserError(
            f"this head reads {', '.join(config.features)} of its base, but vLLM gives heads the "
            f"states that enter {NUM_FEATURES} different layers, or that leave the last one, in "
            "ascending order"
        )
    return read


EAGLE = Layout(
    name="speculators",
    to="speculators",
    kind="eagle",
    parse_config=_parse_eagle,
    leaves=eagle_leaves,
    config_fields=_fields,
    check_exportable=check_eagle,
    copies={EMBEDDING: "embedding"},
    warning=(
        "no current vLLM reads EAGLE-1 heads as speculators (0.32.0 does not); "
        "--to=eagle_vllm writes one that it reads"
    ),
)
EAGLE3 = Layout(
    name="speculators_eagle3",
    to="speculators",
    kind="eagle3",
    parse_config=_parse_eagle3,
    leaves=functools.partial(eagle3_leaves, prefix="layers.0."),
    config_fields=_fields,
    check_exportable=_check_eagle3,
    copies={EMBEDDING: "embedding"},
    more_tensors=vocabulary_tensors,
    optional=(OFFSETS, KEPT),
)
