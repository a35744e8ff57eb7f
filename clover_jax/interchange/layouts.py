"""The table of layouts that heads can be converted from and to."""

from __future__ import annotations

from clover_jax.errors import UserError
from clover_jax.interchange import clover2, eagle, eagle3, eagle_servers, medusa, speculators
from clover_jax.interchange.layout import Layout

NATIVE = "orbax"  # not a layout of others: our own draft directories
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        clover2.LAYOUT,
        eagle.LAYOUT,
        eagle_servers.VLLM,
        eagle_servers.SGLANG,
        eagle3.LAYOUT,
        medusa.ORIGINAL,
        medusa.VLLM,
        speculators.EAGLE_LAYOUT,
        speculators.EAGLE3_LAYOUT,
    )
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
