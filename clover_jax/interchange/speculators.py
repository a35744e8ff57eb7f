"""EAGLE heads in the layout of vLLM's speculators: a config of their own beside official tensors.

Sources: the speculators library's schema and vLLM's reader. EAGLE-3's layer is called `layers.0.`
here, not `midlayer.`, and the base's embedding is stored with it. `norm_before_residual` is always
written: without it vLLM takes true and the schema false. Our heads, like the method's own, add to
the state as it was before its norm. A state that a head reads has the id of the layer that it
enters; vLLM 0.32.0 offers the state after the last layer as well, under the id `num_layers`, which
short bases need. EAGLE-1 heads were in the library's first version only; the
layout that vLLM reads today is in eagle.py.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle import EagleConfig
from clover_jax.drafters.eagle3 import NUM_FEATURES, Eagle3Config
from clover_jax.errors import UserError
from clover_jax.interchange import eagle, eagle3
from clover_jax.interchange.eagle3 import NORM_FIRST, STATES, all_states
from clover_jax.interchange.layout import Layout
from clover_jax.interchange.llama_fields import check_llama_layer, eagle_fields
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.families import architecture_of
from clover_jax.storage.json_files import read_json_object

TARGET = "speculators"
VERSION = "0.1.0"
LAYER = "layers.0."
DRAFTED_TOKENS = 5  # a server's default of tokens to draft with an EAGLE-1 head
_ALGORITHM, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"


def _parse_eagle(values: dict[str, Any], path: Path, base: BaseConfig) -> EagleConfig:
    # The bias of fc has another name here.
    fields = _layer_config(values, path) | {"bias": values.get("fusion_bias", False)}
    return eagle.parse_config(fields, path, base)


def _parse_eagle3(values: dict[str, Any], path: Path, base: BaseConfig) -> Eagle3Config:
    layer = _layer_config(values, path)
    # Absent means true to vLLM and false to the schema, so only a written false is sure.
    if values.get(NORM_FIRST) is not False:
        raise UserError(
            f"{path}: {NORM_FIRST} is {values.get(NORM_FIRST, 'missing')}; only heads with false "
            "can be read, which add to the state as it was before its norm"
        )
    # EAGLE-3's own reader looks for the size beside the fields of the layer.
    fields = layer | {"draft_vocab_size": values.get("draft_vocab_size")}
    config = eagle3.parse_config(fields, path, base)
    ids = values.get(STATES)
    if not ids:  # to vLLM a config without them, or with an empty list, means the method's own
        return config
    return dataclasses.replace(config, features=_features(ids, path, base))


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


def _features(ids: Any, path: Path, base: BaseConfig) -> tuple[str, ...]:
    # An id that is no state of this base shows that the head is another's.
    names = all_states(base)
    if not _are_states(ids) or not set(ids) <= set(range(len(names))):
        raise UserError(
            f"{path}: {STATES} must be {NUM_FEATURES} different ids from 0 to {base.num_layers}, "
            f"the number of the base's layers, in ascending order, not {ids!r}"
        )
    return tuple(names[index] for index in ids)


def _are_states(ids: Any) -> bool:
    # vLLM returns states while it runs the layers: each once, in their order.
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        return False
    return len(ids) == NUM_FEATURES and ids == sorted(set(ids))


def _eagle1_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    own = {
        "architectures": ["EagleSpeculator"],
        # Only EAGLE-3 heads have ids of states; this head reads the base's last state.
        STATES: None,
        "layernorms": False,
        "fusion_bias": config.fc_bias,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        _LAYER_CONFIG: eagle.config_fields(config, base),
    }
    return _shared_fields("eagle", config, base, DRAFTED_TOKENS) | own


def _eagle3_fields(config: Eagle3Config, base: BaseModel) -> dict[str, Any]:
    own = {
        "architectures": ["Eagle3Speculator"],
        STATES: _state_ids(config, base.config),
        _LAYER_CONFIG: eagle_fields(config, base.config, "LlamaForCausalLM"),
    }
    return _shared_fields("eagle3", config, base, config.num_positions) | own


def _shared_fields(
    algorithm: str, config: EagleConfig | Eagle3Config, base: BaseModel, drafted_tokens: int
) -> dict[str, Any]:
    # Settings of a server, which a user's own replace.
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    # vLLM loads the base that is named here where a user gives it the head alone.
    path = base.directory / "config.json"
    architecture = architecture_of(read_json_object(path), path)
    verifier = {"name_or_path": base.source, "architectures": [architecture]}
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
            "verifier": verifier,
        },
    }


def _check_eagle3(config: Eagle3Config, base: BaseConfig) -> None:
    check_llama_layer(config.layer)
    # Called for its error, before anything is written.
    _state_ids(config, base)
    # Our own field for biases of q, k and v alone means nothing to vLLM.
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


EAGLE_LAYOUT = Layout(
    name="speculators",
    to=TARGET,
    kind="eagle",
    parse_config=_parse_eagle,
    leaves=eagle.eagle_leaves,
    config_fields=_eagle1_fields,
    check_exportable=eagle.check_exportable,
    copies={eagle.EMBEDDING: "embedding"},
    warning=(
        "no current vLLM reads EAGLE-1 heads as speculators (0.32.0 does not); "
        "--to=eagle_vllm writes one that it reads"
    ),
)
EAGLE3_LAYOUT = Layout(
    name="speculators_eagle3",
    to=TARGET,
    kind="eagle3",
    parse_config=_parse_eagle3,
    leaves=functools.partial(eagle3.eagle3_leaves, prefix=LAYER),
    config_fields=_eagle3_fields,
    check_exportable=_check_eagle3,
    copies={eagle.EMBEDDING: "embedding"},
    more_tensors=eagle3.vocabulary_tensors,
    optional=(eagle3.OFFSETS, eagle3.KEPT),
)
