"""Over which mesh axes the dimensions of each parameter are split.

A parameter is laid out by the last name of its path (`PARAM_LAYOUTS`), one letter a dimension: D a
width, E a width as output, F an MLP's width, K and N heads, H a head's entries, R a rank, V the
vocabulary. These are not the axis letters of `array_types`, where E, F and R are EOS ids, features
and flattened rows. A new drafter adds its leaves here.
"""

from __future__ import annotations

import dataclasses
import re

import jax
from jax.sharding import PartitionSpec

from clover_jax.array_types import LeafPath
from clover_jax.errors import UserError
from clover_jax.models.int8 import Int8Matrix
from clover_jax.models.meshes import AnyMesh

# The mesh axis of each letter; "-" is never split. E is D where a matrix puts it out, so that a
# square matrix is split over both axes; R is the rank of a correction.
_AXIS = dict.fromkeys("DR", "fsdp") | dict.fromkeys("EFKNV", "tensor")
# Where heads cannot be dealt out, each device holds all of them, or a part of each where a product
# with one is a sum over its entries only (H). A rank may be small and odd.
_WHOLE_IF_INDIVISIBLE = frozenset("KNR")

# Name of a leaf, without its number where numbered ones are alike -> its dimensions.
PARAM_LAYOUTS: dict[str, str] = {
    # The base, and decoder layers inside drafts.
    "embedding": "V D",
    "lm_head": "V D",
    "draft_lm_head": "V D",
    "scale": "-",
    "qkv": "D K - -",
    "qkv_bias": "K - -",
    "query_norm": "-",
    "key_norm": "-",
    "queries_norm": "K - -",
    "keys_norm": "K -",
    "sinks": "K -",
    "out": "K - - D",
    "out_bias": "-",
    # Embeddings of tokens for each layer, which gate a branch of it.
    "token_embedding": "V D",
    "token_projection": "D E",
    "token_gate": "D -",
    "token_out": "- D",
    # A delta net is split by its key heads.
    "delta_in": "D K -",
    "delta_gates": "D K -",
    "delta_conv": "- K -",
    "delta_rate": "K -",
    "delta_rate_bias": "K -",
    "gate_up": "D - F",
    "gate_up_bias": "- F",
    "down": "F D",
    "down_bias": "-",
    # Experts are split by their width: the work is even, whichever experts are chosen. With whole
    # experts on each device XLA gathers all of them for a grouped product.
    "router": "D -",
    "router_bias": "-",
    "router_scale": "-",
    "expert_scale": "-",
    "choice_bias": "-",
    "shared_gate": "D -",
    "expert_gate_bias": "- F",
    "expert_up_bias": "- F",
    "expert_down_bias": "- -",
    "expert_gate": "- D F",
    "expert_up": "- D F",
    "expert_down": "- F D",
    # Clover-2 (and Clover): Attention Decoders and projectors.
    "query": "D N H",
    "query_bias": "N H",
    "key_value": "D - N H",
    "key_value_bias": "- N H",
    "projector_0": "D E",
    "projector_0_bias": "-",
    "projector_1": "- D E",
    "projector_1_bias": "-",
    # Clover-LR: its block of proposals, and what lives in the few dimensions of the correction.
    "fuse": "- D E",
    "token_mix": "D E",
    "block": "D - E",
    "block_bias": "- -",
    "output_scale": "-",
    "state_size": "-",
    "correction_out": "V R",
    "state_in": "D -",
    "token_in": "D -",
    "gates": "- - -",
    "gates_bias": "- -",
    "candidate": "- -",
    "mix": "- -",
    # Its pointer into the text.
    "point_from": "D -",
    "point_to": "D -",
    "of_length": "- -",
    # EAGLE's kind: the matrix that mixes what the layer reads.
    "fc": "- D E",
    "fc_bias": "-",
    # DFlash 2: the kernels of its convolutions, and its selector.
    "base_kernel": "- - -",
    "kernel_projection": "D - - E",
    "predecessor": "V R",
    "successor": "V R",
    "selector_gate": "D -",
    # Clover's MLP in the place of an Attention Decoder.
    "inward": "- D E",
    "inward_bias": "-",
    # A residual block for each position; Medusa's lm_head_0 .. lie as lm_head.
    "weight": "- D E",
    "bias": "- -",
    # In a train state: the bits of the run's random key.
    "key": "-",
}


# The parts of a quantized matrix lie as the matrix does; its steps are 1 along some of the axes.
_FIELDS = frozenset(field.name for field in dataclasses.fields(Int8Matrix))


def param_spec(path: LeafPath, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Return over which axes a leaf's dimensions are split.

    Raises UserError naming a leaf without a rule, or a dimension that its axis does not divide.
    """
    if not shape:
        return PartitionSpec()
    # The two parts of an int8 matrix are split as the matrix is.
    if path[-1] in _FIELDS:
        path = path[:-1]
    layout = _layout_of(path, len(shape))
    axes = [
        _axis_for(letter, size, path, mesh) if letter not in "-H" else None
        for letter, size in zip(layout, shape, strict=True)
    ]
    # Where heads cannot be divided among devices, every device has a part of each.
    if "H" in layout and axes[layout.index("N")] is None:
        entries = layout.index("H")
        axes[entries] = "tensor" if shape[entries] % mesh.shape["tensor"] == 0 else None
    return PartitionSpec(*axes)


def _layout_of(path: LeafPath, rank: int) -> list[str]:
    one_of_many = re.sub(r"_\d+$", "", path[-1])
    layout = PARAM_LAYOUTS.get(path[-1], PARAM_LAYOUTS.get(one_of_many, "")).split()
    if len(layout) == rank:
        return layout
    raise UserError(
        f"parameter {'/'.join(path)} with {rank} dimensions has no rule for a mesh; "
        "add its layout to PARAM_LAYOUTS in clover_jax/models/param_layouts.py"
    )


def _axis_for(letter: str, size: int, path: LeafPath, mesh: AnyMesh) -> str | None:
    axis = _AXIS[letter]
    if size % mesh.shape[axis] == 0:
        return axis
    # A whole copy costs memory only; half a head would be wrong.
    if letter in _WHOLE_IF_INDIVISIBLE or size == 1:
        return None
    raise UserError(
        f"parameter {'/'.join(path)}: its dimension {letter} of {size} cannot be split over "
        f"{axis}={mesh.shape[axis]}; pass --mesh with an axis size that divides it"
    )


def leaf_path(path: tuple) -> LeafPath:
    """Return a path's keys as names: of dicts, of fields, of positions."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
