"""The official Clover-2 layout: config.json with a "clover" object beside model.safetensors.

Source: the authors' release. Its readers rotate with base 10 000 whatever `rope_theta` says, so a
head read from this layout does so too, and one trained with another base cannot be written.
"""

from __future__ import annotations

from pathlib import Path

from clover_jax.config import BaseConfig
from clover_jax.drafters.clover2 import Clover2Config
from clover_jax.interchange.clover2_config import (
    ROPE_THETA,
    check_exportable,
    config_fields,
    read_config,
)
from clover_jax.interchange.clover2_tensors import clover2_leaves
from clover_jax.interchange.layout import Layout

# Frozen copies of the base's output matrix.
COPIES = ("lm_head.weight", "clover_embed_tokens.weight")


def _read_config(directory: Path, rope_theta: float | None, base: BaseConfig) -> Clover2Config:
    return read_config(directory / "config.json", rope_theta or ROPE_THETA)


LAYOUT = Layout(
    name="clover2",
    to="clover2",
    kind="clover2",
    read_config=_read_config,
    leaves=clover2_leaves,
    config_fields=lambda config, base: config_fields(config, base.config),
    check_exportable=check_exportable,
    copies=dict.fromkeys(COPIES, "lm_head"),
)
