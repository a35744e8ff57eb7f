"""Bytes that a device holds of sharded arrays, from shapes alone."""

from __future__ import annotations

import dataclasses
import math

import jax

from clover_jax.array_types import PyTree
from clover_jax.models.meshes import AnyMesh, make_abstract_mesh, shape_of
from clover_jax.models.placement import param_shardings


def bytes_per_device(shapes: PyTree, shardings: PyTree) -> int:
    """Return the bytes of the shards that one device holds."""
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    )


def gathered_bytes(base: PyTree, mesh: AnyMesh) -> int:
    """Return the bytes of a base's weights that fsdp has gathered on a device at one time.

    Its matrices over the vocabulary, which stay for the whole step, and two layers: one at work
    and the next on its way.
    """
    # Nothing is split over fsdp, so nothing is gathered.
    if mesh.shape["fsdp"] == 1:
        return 0
    vocabulary = {name: base[name] for name in ("embedding", "lm_head") if name in base}
    layers = [part for name, part in base.items() if name.startswith("layers_")]
    largest = max(whole_over_rows(layer, mesh) for layer in layers)
    return whole_over_rows(vocabulary, mesh) + 2 * largest


def whole_over_rows(params: PyTree, mesh: AnyMesh) -> int:
    """Return the bytes on a device of params that are gathered over fsdp."""
    # The layout that the params would have on the same mesh with fsdp=1.
    whole = make_abstract_mesh(dataclasses.replace(shape_of(mesh), fsdp=1))
    return bytes_per_device(params, param_shardings(params, whole))
