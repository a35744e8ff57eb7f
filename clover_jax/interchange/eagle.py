"""The official EAGLE-1 and -2 layout: a Llama config beside one layer and `fc`.

Source: EAGLE's repository. Its readers rotate with the config's `rope_theta`, 10 000 where there is
none, and build `fc` with a bias unless the config says `"bias": false`. `embed_tokens` is a copy of
the base's input embedding; output matrix and final norm are the base's own and not stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_jax.config import BaseConfig
from clover_jax.drafters.eagle import METHOD_LOSS, EagleConfig
from clover_jax.errors import UserError
from clover_jax.interchange.layout import Layout
from clover_jax.interchange.llama_fields import check_llama_layer, llama_fields, read_layer
from clover_jax.pretrained.llama_tensors import layer_leaves
from clover_jax.pretrained.tensor_map import Leaf, Piece, whole
from clover_jax.storage.json_files import read_json_object

EMBEDDING = "embed_tokens.weight"  # a frozen copy of the base's


def read_config(path: Path, rope_theta: float | None = None) -> EagleConfig:
    """Read the head's config.

    Raises UserError for what is missing or cannot be.
    """
    return parse_config(read_json_object(path), path, rope_theta)


def parse_config(
    values: dict[str, Any], path: Path, rope_theta: float | None = None
) -> EagleConfig:
    """Turn the fields of a head's config into ours; raises as `read_config`."""
    return EagleConfig(
        layer=read_layer(values, path, rope_theta),
        vocab_size=values["vocab_size"],
        fc_bias=bool(values.get("bias", True)),
        loss=METHOD_LOSS,
    )


def config_fields(config: EagleConfig, base: BaseConfig) -> dict[str, Any]:
    """Return what config.json holds for a head of a base."""
    fields = {"architectures": ["LlamaForCausalLM"], **llama_fields(config, base)}
    return fields | {"bias": config.fc_bias}


def check_exportable(config: EagleConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    if config.draft_to_target is not None:
        raise UserError(
            f"this head drafts over {len(config.draft_to_target)} of the base's "
            f"{config.vocab_size} tokens, and the EAGLE-1 layout has no draft vocabulary; train "
            "one without --draft_vocab to export it"
        )
    check_llama_layer(config.layer)


def eagle_leaves(config: EagleConfig) -> list[Leaf]:
    """Return where the official tensors lie in `drafters.eagle.Eagle`'s params."""
    width = config.layer.hidden_size
    # [D, 2D] over concat(embedding, state) to fc [2, D, D].
    piece = Piece("fc.weight", (width, 2 * width), (width, 2, width), (1, 2, 0))
    leaves = [Leaf(("fc",), (2, width, width), (piece,))]
    if config.fc_bias:
        leaves.append(whole(("fc_bias",), "fc.bias", (width,)))
    return leaves + layer_leaves(config.layer, ("layer",), "layers.0.", input_norm=False)


def _read_config(directory: Path, rope_theta: float | None, base: BaseConfig) -> EagleConfig:
    return read_config(directory / "config.json", rope_theta)


LAYOUT = Layout(
    name="eagle",
    to="eagle",
    kind="eagle",
    read_config=_read_config,
    leaves=eagle_leaves,
    config_fields=lambda config, base: config_fields(config, base.config),
    check_exportable=check_exportable,
    copies={EMBEDDING: "embedding"},
)
