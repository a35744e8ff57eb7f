"""The frozen base as teacher: the activations a head reads, the states it should predict."""

from __future__ import annotations

import jax
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.data.batch import Batch
from clover_jax.drafters.drafter import select_features
from clover_jax.models.decoder import Decoder, packed_mask
from clover_jax.models.layers import RMSNorm


@struct.dataclass
class TeacherOutput:
    """What the base says about a batch; no gradient flows into it.

    features: [B, S, F] the activations that the head reads.
    states:   [B, S, D] g, the states after the final norm, whose logits are the base's.
    """

    features: Float[Array, "B S F"]
    states: Float[Array, "B S D"]


def teach(
    base: BaseConfig, base_params: Params, features: tuple[str, ...], batch: Batch
) -> TeacherOutput:
    """Return what the base says: as the batch brings it along, else by running the base.

    features: names of the activations, as in `DrafterConfig.features`.
    """
    teacher = online_teacher if batch.hidden is None else cached_teacher
    return teacher(base, base_params, features, batch)


def stored_names(features: tuple[str, ...]) -> tuple[str, ...]:
    """Return the activations to keep for a head that reads `features`.

    The final norm of h gives g exactly, so g is kept only where h is not.
    Example: ("pre_norm",) gives ("pre_norm",); ("layer_2",) gives ("layer_2", "post_norm").
    """
    names = {*features, "post_norm"} - ({"post_norm"} if "pre_norm" in features else set())
    return tuple(sorted(names))


def cached_teacher(
    base: BaseConfig, base_params: Params, features: tuple[str, ...], batch: Batch
) -> TeacherOutput:
    """Return the activations that the batch brings along, in the base's dtype."""
    with jax.named_scope("teacher"):
        dtype = base_params["embedding"].dtype
        hidden = {name: value.astype(dtype) for name, value in batch.hidden.items()}
        if "post_norm" not in hidden:
            norm = RMSNorm(base.rms_norm_eps)
            scale = {"params": base_params["final_norm"]}
            hidden["post_norm"] = norm.apply(scale, hidden["pre_norm"])
        teacher = TeacherOutput(
            features=select_features(hidden, features), states=hidden["post_norm"]
        )
    return jax.lax.stop_gradient(teacher)


def online_teacher(
    base: BaseConfig, base_params: Params, features: tuple[str, ...], batch: Batch
) -> TeacherOutput:
    """Run the base on a packed batch; documents of one row do not see each other.

    features: names of the activations, as in `DrafterConfig.features`.
    """
    with jax.named_scope("teacher"):
        hidden = read_base(base, base_params, batch.tokens, batch.segment_ids, batch.positions)
        teacher = TeacherOutput(
            features=select_features(hidden, features), states=hidden["post_norm"]
        )
    return jax.lax.stop_gradient(teacher)


def read_base(
    base: BaseConfig,
    base_params: Params,
    tokens: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
    positions: Int[Array, "B S"],
) -> dict[str, Float[Array, "B S D"]]:
    """Return all activations of packed rows, by name; those unused cost nothing in jit."""
    decoder = Decoder(base)
    output = decoder.apply({"params": base_params}, tokens, positions, packed_mask(segment_ids))
    return output.hidden
