"""The frozen base as teacher: the activations a head reads, the states it should predict."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.drafters.drafter import select_features
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, packed_mask
from clover_jax.models.layers import RMSNorm
from clover_jax.sharding.meshes import AnyMesh
from clover_jax.sharding.placement import over_rows_of


class TeacherOutput(struct.PyTreeNode):
    """The base's activations for a batch; no gradient flows into them.

    features: [B, S, F] the activations that the head reads.
    states:   [B, S, D] g, the states after the final norm, whose logits are the base's.
    """

    features: Float[Array, "B S F"]
    states: Float[Array, "B S D"]


def teach(
    base: BaseConfig,
    base_params: Params,
    features: tuple[str, ...],
    batch: Batch,
    mesh: AnyMesh | None = None,
) -> TeacherOutput:
    """Return the base's activations: those stored in the batch, else by running the base.

    features: names of the activations, as in `DrafterConfig.features`.
    mesh: as `read_base` has it.
    """
    with jax.named_scope("teacher"):
        if batch.hidden is None:
            packed = batch.tokens, batch.segment_ids, batch.positions
            hidden = read_base(base, base_params, *packed, mesh=mesh)
        else:
            hidden = _stored_activations(base, base_params, batch.hidden)
        features_read = select_features(hidden, features)
        teacher = TeacherOutput(features=features_read, states=hidden["post_norm"])
    return jax.lax.stop_gradient(teacher)


def stored_names(features: tuple[str, ...]) -> tuple[str, ...]:
    """Return the activations to keep for a head that reads `features`.

    The final norm of h gives g exactly, so g is kept only where h is not.
    Example: ("pre_norm",) gives ("pre_norm",); ("layer_2",) gives ("layer_2", "post_norm").
    """
    names = {*features, "post_norm"} - ({"post_norm"} if "pre_norm" in features else set())
    return tuple(sorted(names))


def _stored_activations(
    base: BaseConfig, base_params: Params, stored: dict[str, Array]
) -> dict[str, Array]:
    """Return activations that `prepare` kept, in the base's dtype, and g where only h was kept."""
    # Bytes on disk may be fewer than the base computes with.
    dtype = base_params["embedding"].dtype
    hidden: dict[str, Any] = {name: each.astype(dtype) for name, each in stored.items()}
    if "post_norm" not in hidden:
        scale = {"params": base_params["final_norm"]}
        hidden["post_norm"] = RMSNorm(base.rms_norm_eps).apply(scale, hidden["pre_norm"])
    return hidden


def read_base(
    base: BaseConfig,
    base_params: Params,
    tokens: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    *,
    mesh: AnyMesh | None = None,
) -> dict[str, Float[Array, "B S D"]]:
    """Return all activations of packed rows, by name; those unused cost nothing in jit.

    Documents of one row do not see each other.
    mesh: the devices that rows and params are split over; params are gathered over fsdp already.
    """

    def read(params: Params, tokens: Array, segment_ids: Array, positions: Array) -> dict:
        mask = packed_mask(segment_ids)
        output: Any = Decoder(base).apply({"params": params}, tokens, positions, mask)
        return output.hidden

    if mesh is None or not base.num_experts:
        return read(base_params, tokens, segment_ids, positions)
    # Tokens are sorted by their experts: left alone, the compiler sorts those of all devices on
    # each, and computes all of them.
    return over_rows_of(mesh, read, base_params, tokens, segment_ids, positions)
