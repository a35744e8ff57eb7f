"""The table of layouts that heads can be converted from and to, and their recognition."""

from __future__ import annotations

from pathlib import Path

from clover_jax.checkpoints import clover2, dflash2, eagle, medusa, mtp
from clover_jax.checkpoints.config_json import read_config
from clover_jax.checkpoints.layout import Layout
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.errors import UserError

NATIVE = "orbax"  # our own draft directories, which are not in the table
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        clover2.LAYOUT,
        eagle.EAGLE,
        eagle.VLLM,
        eagle.SGLANG,
        eagle.EAGLE3,
        eagle.EAGLE3_TPU,
        dflash2.LAYOUT,
        mtp.LAYOUT,
        medusa.ORIGINAL,
        medusa.VLLM,
        eagle.SPECULATORS,
        eagle.SPECULATORS_EAGLE3,
    )
}


def layout_for(to: str, kind: str) -> Layout:
    """Return the layout that `convert --to` means for a kind of head; raises UserError for none."""
    # One name may stand for a layout of each of several kinds, so the kind decides.
    fitting = {layout.to: layout for layout in LAYOUTS.values() if layout.kind == kind}
    if to in fitting:
        return fitting[to]

    kinds = " and ".join(layout.kind for layout in LAYOUTS.values() if layout.to == to)
    if fitting:
        advice = f"can be written as {', '.join([NATIVE, *fitting])}"
    else:
        advice = f"no other program's layout holds; only --to={NATIVE} is left"
    raise UserError(
        f"--to={to} holds {kinds} heads, and this is one of kind {kind}, which {advice}"
    )


def recognize(directory: Path) -> Layout:
    """Return the layout of a folder of draft weights; raises UserError describing any other."""
    # Some layouts are named in config.json.
    values = read_config(directory / "config.json")
    if "clover" in values:
        return clover2.LAYOUT
    if dflash2.FIELDS in values:
        return dflash2.LAYOUT
    if "speculators_model_type" in values:
        # EAGLE-1's reader refuses heads of other algorithms by name.
        is_eagle3 = values["speculators_model_type"] == "eagle3"
        return eagle.SPECULATORS_EAGLE3 if is_eagle3 else eagle.SPECULATORS
    if "medusa_num_heads" in values:
        return medusa.ORIGINAL
    if values.get("model_type") == "medusa":
        return medusa.VLLM

    # The others have a Llama config, so they are recognized by the names of their tensors.
    names = TensorFiles(directory).shapes
    if names and all(name.startswith("mtp.") for name in names):
        return mtp.LAYOUT
    # An EAGLE-3 head over the whole vocabulary may lack d2t, but every one has `midlayer`.
    if "d2t" in names or "midlayer.mlp.up_proj.weight" in names:
        return eagle.EAGLE3
    # One reader for EAGLE's own folders, vLLM's and SGLang's.
    if "fc.weight" in names:
        return eagle.EAGLE

    # Near misses are named, so that a user sees which folder was given.
    if "clover_head_mlp.weight" in names:
        kind = 'an official Clover-2 head without the "clover" object in its config.json'
    elif "model.embed_tokens.weight" in names:
        kind = "a base model"
    else:
        raise UserError(
            f'{directory} is in no known draft layout: its config.json has no "clover" object, '
            f"and its first tensor is {min(names, default='missing')}"
        )
    raise UserError(
        f"{directory} is {kind}, which cannot be read as a draft; native draft folders and the "
        "official layouts of Clover-2, EAGLE, DFlash and Medusa can"
    )
