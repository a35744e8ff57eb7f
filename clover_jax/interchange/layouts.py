"""The table of layouts that heads can be converted from and to."""

from __future__ import annotations

from pathlib import Path

from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.interchange import clover2_config, eagle, eagle3, medusa, speculators
from clover_jax.interchange.clover2 import COPIES
from clover_jax.interchange.clover2_tensors import clover2_leaves
from clover_jax.interchange.layout import Layout

NATIVE = "orbax"  # not a layout of others: our own draft directories


def _read_clover2(directory: Path, rope_theta: float | None, base: BaseConfig):
    return clover2_config.read_config(
        directory / "config.json", rope_theta or clover2_config.ROPE_THETA
    )


def _read_eagle(directory: Path, rope_theta: float | None, base: BaseConfig):
    return eagle.read_config(directory / "config.json", rope_theta)


LAYOUTS: dict[str, Layout] = {
    "clover2": Layout(
        name="clover2",
        to="clover2",
        kind="clover2",
        read_config=_read_clover2,
        leaves=clover2_leaves,
        config_fields=lambda config, base: clover2_config.config_fields(config, base.config),
        check_exportable=clover2_config.check_exportable,
        copies=dict.fromkeys(COPIES, "lm_head"),
    ),
    "eagle": Layout(
        name="eagle",
        to="eagle",
        kind="eagle",
        read_config=_read_eagle,
        leaves=eagle.eagle_leaves,
        config_fields=lambda config, base: eagle.config_fields(config, base.config),
        check_exportable=eagle.check_exportable,
        copies={eagle.EMBEDDING: "embedding"},
    ),
    "eagle3": Layout(
        name="eagle3",
        to="eagle3",
        kind="eagle3",
        read_config=eagle3.read_config,
        leaves=eagle3.eagle3_leaves,
        config_fields=eagle3.exported_fields,
        check_exportable=eagle3.check_exportable,
        more_tensors=eagle3.vocabulary_tensors,
    ),
    "medusa": medusa.ORIGINAL,
    "medusa_vllm": medusa.VLLM,
    "speculators": speculators.EAGLE_LAYOUT,
    "speculators_eagle3": speculators.EAGLE3_LAYOUT,
}


def layout_for(to: str, kind: str) -> Layout:
    """Return the layout that `convert --to` means for a head of a kind.

    Raises UserError where that layout holds heads of other kinds.
    """
    fitting = {layout.to: layout for layout in LAYOUTS.values() if layout.kind == kind}
    if to in fitting:
        return fitting[to]
    kinds = " and ".join(layout.kind for layout in LAYOUTS.values() if layout.to == to)
    raise UserError(
        f"--to={to} holds {kinds} heads, and this is one of kind {kind}, which "
        + (
            f"can be written as {', '.join([NATIVE, *fitting])}"
            if fitting
            else f"no other program's layout holds; only --to={NATIVE} is left"
        )
    )
