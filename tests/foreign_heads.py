"""Heads in layouts of others: to a folder and back, and what their own code computed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Params
from clover_jax.checkpoints.base import BaseModel, fingerprint
from clover_jax.checkpoints.card import Card
from clover_jax.checkpoints.layouts import LAYOUTS
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import StoredHead, load_draft, write_foreign
from clover_jax.config import DrafterConfig
from clover_jax.models.batch import Batch


def write_layout(
    name: str, folder: Path, config: DrafterConfig, params: Params, base: BaseModel
) -> None:
    """Write a head as `convert` does, in the type of its params."""
    leaves = {
        tuple(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    dtypes = {"/".join(path): leaf.dtype for path, leaf in leaves.items()}
    card = Card(config, fingerprint(base), None, {})
    head = StoredHead("memory", folder, card, "memory", shapes, dtypes, leaves.__getitem__)
    write_foreign(folder, head, LAYOUTS[name], base)


def read_layout(name: str, folder: Path, base: BaseModel, *arguments, **options):
    """Return (config, params) of a head of that layout; arguments are those of `load_draft`."""
    draft = load_draft(folder, base, *arguments, **options)
    assert draft.provenance == {"layout": name}
    return draft.head.config, draft.params


def read_reference(folder: Path, name: str):
    """Return (base, draft, batch, arrays) of a fixture that a head's own code made."""
    base, expected = load_base(str(folder / "base")), np.load(folder / "expected.npz")
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    loss_mask = jnp.asarray(expected["loss_mask"] > 0)
    batch = Batch(tokens, jnp.ones_like(tokens), positions, loss_mask)
    return base, load_draft(folder / name, base), batch, expected
