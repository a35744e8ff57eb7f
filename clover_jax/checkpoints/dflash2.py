"""DFlash and DFlash 2 heads: a Qwen3 config with a `dflash_config`, and the layers of the head.

Source: the public training code, whose folders vLLM, SGLang and llama.cpp read. Neither embedding
nor output matrix is stored: both are the base's. `target_layer_ids` names outputs of layers: 0 is
the output of the first one. A config without `selector_rank` and `conv_kernel_size` is DFlash.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.layout import (
    Layout,
    beyond_llama,
    llama_fields,
    refuse_draft_vocabulary,
)
from clover_jax.checkpoints.llama_config import check_count
from clover_jax.checkpoints.llama_kin import parse_qwen3_config
from clover_jax.checkpoints.llama_tensors import layer_leaves, norm_leaf
from clover_jax.checkpoints.tensor_map import Leaf, Piece, over_states, transposed, whole
from clover_jax.config import BaseConfig
from clover_jax.drafters.dflash2 import DFlash2Config, method_loss, output_of
from clover_jax.errors import UserError

FIELDS = "dflash_config"
_LAYERS, _MASK, _BLOCK = "target_layer_ids", "mask_token_id", "block_size"
_BASE_LAYERS = "num_target_layers"
# The fields that DFlash 2 adds to DFlash, with the values that mean plain DFlash.
_ADDED = {"selector_rank": 0, "selector_top_k": 16, "conv_kernel_size": 0, "conv_group_size": 16}


def parse_config(values: dict[str, Any], path: Path, base: BaseConfig) -> DFlash2Config:
    """Turn the fields of a head's config into ours; unknown ones are refused too."""
    own = _own_fields(values, path)
    # The head's layers have no window, so one would be silently ignored.
    layer_types = values.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise UserError(f"{path}: layer_types is {layer_types}; only full_attention can be read")
    if values.get("mlp_bias"):
        raise UserError(f"{path}: mlp_bias is true, but layers of Qwen3 have none")
    if values.get(_BASE_LAYERS) not in (None, base.num_layers):
        raise UserError(
            f"{path}: {_BASE_LAYERS} is {values[_BASE_LAYERS]!r}, but the base has "
            f"{base.num_layers} layers; give the base that the head was trained for"
        )
    llama = parse_qwen3_config(values, path)
    if any(llama.layer_at(index).sliding_window for index in range(llama.num_layers)):
        raise UserError(
            f"{path}: use_sliding_window gives layers of the head a window; only heads without one "
            "can be read"
        )

    # A block has a slot for the token before the drafts, too.
    try:
        return DFlash2Config(
            layer=llama.head_layer,
            vocab_size=llama.vocab_size,
            num_positions=own[_BLOCK] - 1,
            max_depth=own[_BLOCK] - 1,
            features=_features(own[_LAYERS], base, path),
            mask_token_id=own[_MASK],
            num_layers=llama.num_layers,
            rank=own["selector_rank"],
            candidates=own["selector_top_k"],
            conv_taps=own["conv_kernel_size"],
            conv_group=own["conv_group_size"],
            loss=method_loss(own[_BLOCK], own["selector_rank"]),
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _own_fields(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `dflash_config`, all of them whole numbers but the layers."""
    fields = values[FIELDS]
    if not isinstance(fields, dict):
        raise UserError(f"{path}: {FIELDS} must be an object, not {fields!r}")
    # An unknown field may be a part of the head that would be silently left out.
    unknown = sorted(set(fields) - {_LAYERS, _MASK, _BLOCK, *_ADDED})
    if unknown:
        raise UserError(
            f"{path}: {FIELDS} has fields of no known DFlash or DFlash 2 head: {', '.join(unknown)}"
        )

    # DFlash stores the size of its block outside the object.
    own = _ADDED | {_BLOCK: values.get(_BLOCK)} | fields
    check_count(own, _BLOCK, path)
    if values.get(_BLOCK, own[_BLOCK]) != own[_BLOCK]:
        raise UserError(
            f"{path}: {_BLOCK} is {values[_BLOCK]!r}, but {own[_BLOCK]} within {FIELDS}"
        )
    for name in (_MASK, *_ADDED):
        # Not isinstance: to it True is an int.
        if type(own.get(name)) is not int:
            raise UserError(f"{path}: {name} must be a whole number, not {own.get(name)!r}")
    return own


def _features(ids: Any, base: BaseConfig, path: Path) -> tuple[str, ...]:
    count = base.num_layers
    is_list = isinstance(ids, list) and all(type(index) is int for index in ids)
    if not is_list or not ids or not all(0 <= index < count for index in ids):
        raise UserError(
            f"{path}: {_LAYERS} must be a list of layers of the base, 0 to {count - 1}, not {ids!r}"
        )
    return tuple(output_of(index, count) for index in ids)


def config_fields(config: DFlash2Config, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for a head of a base."""
    added = (config.rank, config.candidates, config.conv_taps, config.conv_group)
    is_plain = not config.rank and not config.conv_taps

    # Readers recognize plain DFlash by the missing fields.
    own = {
        _LAYERS: _layer_ids(config, base.config),
        _MASK: config.mask_token_id,
        _BLOCK: config.block.size,
        **({} if is_plain else dict(zip(_ADDED, added, strict=True))),
    }
    return llama_fields(config, base.config) | {
        "architectures": ["DFlashDraftModel" if is_plain else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "head_dim": config.layer.head_dim,
        "layer_types": ["full_attention"] * config.num_layers,
        _BASE_LAYERS: base.config.num_layers,
        _BLOCK: config.block.size,
        FIELDS: own,
    }


def check_exportable(config: DFlash2Config, base: BaseConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    refuse_draft_vocabulary(config, "DFlash")
    # Called for its error: a head may read states without an id.
    _layer_ids(config, base)

    # Qwen3's layer norms queries and keys; in all else it is Llama's.
    if beyond := beyond_llama(dataclasses.replace(config.layer, query_key_norm=False)):
        raise UserError(
            f"this head has {beyond}, as its base has, but the DFlash layout holds heads of "
            "Qwen3's layers only"
        )


def _layer_ids(config: DFlash2Config, base: BaseConfig) -> list[int]:
    # Our names are of the layer that a state enters, the layout's ids of the layer that it leaves.
    ids = {output_of(index, base.num_layers): index for index in range(base.num_layers)}
    foreign = [name for name in config.features if name not in ids]
    if foreign:
        raise UserError(
            f"this head reads {', '.join(foreign)} of its base, but the DFlash layout has ids for "
            "the outputs of layers only"
        )
    return [ids[name] for name in config.features]


def dflash2_leaves(config: DFlash2Config) -> list[Leaf]:
    """Return the place of the stored tensors in the params of `drafters.dflash2.DFlash2`."""
    width = config.layer.hidden_size
    leaves = [
        over_states(("fc",), "fc.weight", len(config.features), width),
        norm_leaf(("context_norm",), "hidden_norm", width),
    ]
    # Plain DFlash has neither convolutions nor a selector.
    for index in range(config.num_layers):
        path, prefix = (f"layers_{index}",), f"layers.{index}."
        leaves += layer_leaves(config.layer, path, prefix)
        if config.conv_taps:
            for name in ("attention_conv", "mlp_conv"):
                leaves += _convolution(config, (*path, name), f"{prefix}{name}.")
    leaves.append(norm_leaf(("norm",), "norm", width))
    if config.rank:
        prefix, shape = "candidate_selector.", (config.vocab_size, config.rank)
        leaves += [
            whole(("predecessor",), f"{prefix}predecessor_codebook", shape),
            whole(("successor",), f"{prefix}successor_codebook", shape),
            transposed(
                ("selector_gate",), f"{prefix}hidden_projection.weight", (width, config.rank)
            ),
        ]
    return leaves


def _convolution(config: DFlash2Config, path: tuple[str, ...], prefix: str) -> list[Leaf]:
    width, taps = config.layer.hidden_size, config.conv_taps
    # [2 o D / g, D] to [D, 2, o, D / g], of o taps and D / g groups.
    outputs = (2, taps, width // config.conv_group)
    stored = (2 * taps * outputs[-1], width)
    name = f"{prefix}kernel_projection.weight"
    piece = Piece(name, stored, (*outputs, width), (3, 0, 1, 2))
    return [
        whole((*path, "base_kernel"), f"{prefix}base_kernel", (2, taps, width)),
        Leaf((*path, "kernel_projection"), (width, *outputs), (piece,)),
    ]


LAYOUT = Layout(
    name="dflash2",
    kind="dflash2",
    parse_config=parse_config,
    leaves=dflash2_leaves,
    config_fields=config_fields,
    check_exportable=check_exportable,
    family="qwen3",
    classes=("DFlashDraftModel", "DFlash2DraftModel"),
    # Unknown fields of the object are refused.
    fields=dict.fromkeys((FIELDS, _BLOCK, _BASE_LAYERS, "mlp_bias")),
)
