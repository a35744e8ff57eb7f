"""The drafting layer that Qwen3-Next and Qwen3.5 store with the base, under `mtp.`.

`--draft=mtp` reads it from the base's folder; a trained one is written as the same tensors, in a
file that takes the place of theirs. Norms are stored as w for 1 + w, as the base's are. Experts are
stored one by one or together, as in the base's folder.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.layout import Layout, refuse_draft_vocabulary
from clover_jax.checkpoints.llama_tensors import norm_leaf, renamed
from clover_jax.checkpoints.qwen_hybrids import hybrid_leaves
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.checkpoints.tensor_map import Leaf, Piece
from clover_jax.config import BaseConfig
from clover_jax.drafters import registry
from clover_jax.drafters.mtp import MTPConfig, layer_of
from clover_jax.errors import UserError

NAME = "mtp"  # of the draft, and of its tensors' prefix


def parse_config(values: dict[str, Any], path: Path, base: BaseConfig) -> MTPConfig:
    """Return the head's config: the base's."""
    text = values.get("text_config") or values
    for name, readable in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False)):
        if text.get(name, readable) != readable:
            raise UserError(f"{path}: {name} is {text[name]}; only {readable} is read")
    if not base.output_gate:
        raise UserError(
            f"{path}: this base's family brings no drafting layer that is read; only Qwen3-Next's "
            "and Qwen3.5's do. train --drafter=mtp makes one"
        )
    config = registry.config_for_base("mtp", base)
    assert isinstance(config, MTPConfig)
    return config


def brings_one(base: BaseModel) -> bool:
    """Return whether a base's folder has the tensors of a drafting layer."""
    if not base.directory.is_dir():  # a shape's
        return False
    return any(name.startswith("mtp.") for name in TensorFiles(base.directory).shapes)


def mtp_leaves(config: MTPConfig, stacked: bool = False) -> list[Leaf]:
    """Return where the tensors lie in the head's params; stacked: as for `expert_leaves`."""
    # Those of the layer are a one-layer base's.
    base = BaseConfig(**vars(config.layer), vocab_size=config.vocab_size, num_layers=1)
    of_layer = [leaf for leaf in hybrid_leaves(base, stacked=stacked) if leaf.path[0] == "layers_0"]
    moved = [dataclasses.replace(leaf, path=("layer", *leaf.path[1:])) for leaf in of_layer]
    layer = renamed(moved, lambda name: re.sub(r"^model\.", "mtp.", name))

    width = config.layer.hidden_size
    fc = Piece("mtp.fc.weight", (width, 2 * width), (width, 2, width), (1, 2, 0))
    return [
        Leaf(("fc",), (2, width, width), (fc,)),
        norm_leaf(("embedding_norm",), "mtp.pre_fc_norm_embedding", width),
        norm_leaf(("state_norm",), "mtp.pre_fc_norm_hidden", width),
        *layer,
        norm_leaf(("output_norm",), "mtp.norm", width),
    ]


def check_exportable(config: MTPConfig, base: BaseConfig) -> None:
    """Raise UserError for a head that readers of the layout would run differently."""
    refuse_draft_vocabulary(config, "MTP")
    if not base.output_gate or config.layer != layer_of(base):
        raise UserError(
            "the MTP layout holds the drafting layers of Qwen3-Next and Qwen3.5 only, of the "
            "base's own shape and rotation"
        )


def config_fields(config: MTPConfig, base: BaseModel) -> dict[str, Any]:
    """Return what names the base; the tensors belong in its folder."""
    return {"mtp_num_hidden_layers": 1, "base_model_name_or_path": base.source}


LAYOUT = Layout(
    name="mtp",
    kind="mtp",
    parse_config=parse_config,
    leaves=mtp_leaves,
    config_fields=config_fields,
    check_exportable=check_exportable,
    fields=dict.fromkeys(("mtp_num_hidden_layers", "base_model_name_or_path")),
    offset=lambda name: float(name.endswith("norm.weight") or ".pre_fc_norm_" in name),
)


def layout_in(directory: Path) -> Layout:
    """Return the layout of the tensors in a folder, or of a head for the base that lies there."""
    names = TensorFiles(directory).shapes if directory.is_dir() else ()
    own = [name for name in names if name.startswith("mtp.")] or names
    stacked = any(name.endswith(".experts.gate_up_proj") for name in own)
    return dataclasses.replace(LAYOUT, leaves=functools.partial(mtp_leaves, stacked=stacked))
