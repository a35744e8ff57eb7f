"""Medusa heads in the original layout and in vLLM's: a residual block and a matrix each.

Sources: Medusa's repository and vLLM's reader. Both may stack several residual blocks; the method
has one, and only such heads are read. The original's config has neither widths nor vocabulary, so
these are the base's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.layout import Layout, refuse_draft_vocabulary
from clover_jax.checkpoints.llama_config import MOST_LAYERS, check_count
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.checkpoints.tensor_map import Leaf, Piece, whole
from clover_jax.config import BaseConfig
from clover_jax.drafters.medusa import MedusaConfig, make_config
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say


def parse_vllm(values: dict[str, Any], path: Path, base: BaseConfig) -> MedusaConfig:
    """Turn vLLM's fields into ours; another width and a reduced vocabulary are refused."""
    # vLLM's heads may draft over the first tokens alone.
    vocab_size = values.get("vocab_size", base.vocab_size)
    if values.get("truncated_vocab_size", vocab_size) not in (None, vocab_size):
        raise UserError(
            f"{path}: truncated_vocab_size is {values['truncated_vocab_size']} of {vocab_size} "
            "tokens; heads over a part of the vocabulary cannot be read"
        )

    if values.get("hidden_size", base.hidden_size) != base.hidden_size:
        raise UserError(
            f"{path}: hidden_size is {values['hidden_size']}, but the base has "
            f"{base.hidden_size}; give the base that the head was trained for"
        )
    return _config(values, path, base, "num_heads", "num_hidden_layers")


def _vllm_fields(config: MedusaConfig, base: BaseModel) -> dict[str, Any]:
    # num_hidden_layers counts the residual blocks of a head.
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.layer.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_positions,
        "num_hidden_layers": 1,
        # The next two are vLLM's defaults; they do not concern the weights.
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": config.vocab_size,
        "medusa_fc_bias": True,  # the method has biases, vLLM's default has none
        "original_lm_head": False,
    }


def check_exportable(config: MedusaConfig, base: BaseConfig) -> None:
    """Raise UserError for heads without whole output matrices of their own."""
    refuse_draft_vocabulary(config, "Medusa")
    # The base's matrix is not copied for each head: it may be tied, or quantized here.
    if not config.own_output:
        raise UserError(
            "these heads use the base's output matrix, and Medusa's layouts hold one for each; "
            "train with --drafter_options=own_output=true to export them"
        )


def _config(
    values: dict[str, Any], path: Path, base: BaseConfig, heads: str, layers: str
) -> MedusaConfig:
    # The two layouts name these fields differently.
    for name in (heads, layers):
        check_count(values, name, path, MOST_LAYERS)
    # Our head has no place for the tensors of a second block.
    if values[layers] != 1:
        raise UserError(f"{path}: {layers} is {values[layers]}; heads of 1 residual block are read")
    return make_config(base, num_positions=values[heads])


def _leaves(config: MedusaConfig, block: str, matrix: str) -> list[Leaf]:
    """Return the place of the tensors; `{}` in the names stands for the number of a head."""
    positions, width = range(config.num_positions), config.layer.hidden_size
    square, count = (width, width), config.num_positions

    # All residual blocks are one leaf here, which the stored ones fill head by head.
    weight, bias = f"{block}.weight", f"{block}.bias"
    weights = tuple(Piece(weight.format(i), square, square, (1, 0), (i,)) for i in positions)
    biases = tuple(Piece(bias.format(i), (width,), (width,), (0,), (i,)) for i in positions)
    matrices = [
        whole((f"lm_head_{i}",), matrix.format(i), (config.vocab_size, width)) for i in positions
    ]
    return [
        Leaf(("heads", "weight"), (count, *square), weights),
        Leaf(("heads", "bias"), (count, width), biases),
        *matrices,
    ]


def parse_original(values: dict[str, Any], path: Path, base: BaseConfig) -> MedusaConfig:
    """Turn the original's fields into ours; the file says how many heads there are.

    The published heads of Vicuna name 2 in their config and hold 5, which their own program loads.
    """
    heads, layers = "medusa_num_heads", "medusa_num_layers"
    config = _config(values, path, base, heads, layers)
    names, stored = TensorFiles(path.parent).shapes, 0
    while f"{stored}.0.linear.weight" in names:
        stored += 1
    # A head that the file lacks is named when its tensors are checked.
    if stored <= config.num_positions:
        return config
    say(
        f"{path}: {heads} is {config.num_positions}, and the file holds {stored} heads; all of "
        "them are read"
    )
    return _config(values | {heads: stored}, path, base, heads, layers)


ORIGINAL = Layout(
    name="medusa",
    kind="medusa",
    parse_config=parse_original,
    leaves=functools.partial(_leaves, block="{}.0.linear", matrix="{}.1.weight"),
    config_fields=lambda config, base: {
        "medusa_num_heads": config.num_positions,
        "medusa_num_layers": 1,
        "base_model_name_or_path": base.source,
    },
    check_exportable=check_exportable,
    file="medusa_lm_head.safetensors",
    fields=dict.fromkeys(
        ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version")
    ),
)
VLLM = Layout(
    name="medusa_vllm",
    kind="medusa",
    parse_config=parse_vllm,
    leaves=functools.partial(_leaves, block="blocks.{}.layers.0", matrix="lm_heads.{}.weight"),
    config_fields=_vllm_fields,
    fields=dict.fromkeys(
        ("num_heads", "truncated_vocab_size", "medusa_fc_bias", "original_lm_head")
        + ("max_paths", "topk")
    ),
    check_exportable=check_exportable,
)
