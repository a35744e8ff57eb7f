"""The frozen base as teacher: the activations a head reads, the states it should predict."""

from __future__ import annotations

import jax
from flax import struct

from clover_jax.array_types import Array, Float, Params
from clover_jax.config import BaseConfig
from clover_jax.data.batch import Batch
from clover_jax.drafters.drafter import select_features
from clover_jax.models.decoder import Decoder, packed_mask


@struct.dataclass
class TeacherOutput:
    """What the base says about a batch; no gradient flows into it.

    features: [B, S, F] the activations that the head reads.
    states:   [B, S, D] g, the states after the final norm, whose logits are the base's.
    """

    features: Float[Array, "B S F"]
    states: Float[Array, "B S D"]


def online_teacher(
    base: BaseConfig, base_params: Params, features: tuple[str, ...], batch: Batch
) -> TeacherOutput:
    """Run the base on a packed batch; documents of one row do not see each other.

    features: names of the activations, as in `DrafterConfig.features`.
    """
    with jax.named_scope("teacher"):
        output = Decoder(base).apply(
            {"params": base_params},
            batch.tokens,
            batch.positions,
            packed_mask(batch.segment_ids),
        )
        teacher = TeacherOutput(
            features=select_features(output.hidden, features), states=output.hidden["post_norm"]
        )
    return jax.lax.stop_gradient(teacher)
