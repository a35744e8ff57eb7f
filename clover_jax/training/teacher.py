"""The frozen base as teacher: the activations a head reads, the states it should predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from clover_jax.array_types import Array, Float, Int, Params
from clover_jax.config import BaseConfig
from clover_jax.drafters.drafter import select_features
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, LayerParams, packed_mask
from clover_jax.models.layers import RMSNorm
from clover_jax.models.meshes import AnyMesh
from clover_jax.models.placement import gathered, over_rows_of


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
    # A scope's name is how `experiments/aot/costs.py` finds the parts of a compiled step.
    with jax.named_scope("teacher"):
        if batch.hidden is None:
            packed = batch.tokens, batch.segment_ids, batch.positions
            hidden = read_base(base, base_params, *packed, mesh=mesh)
        else:
            # Stored in fewer bytes than the base computes with, perhaps.
            dtype = base_params["embedding"].dtype
            hidden = {name: each.astype(dtype) for name, each in batch.hidden.items()}
            if "post_norm" not in hidden:
                scale = {"params": base_params["final_norm"]}
                norm: Any = RMSNorm(base.rms_norm_eps)
                hidden["post_norm"] = norm.apply(scale, hidden["pre_norm"])
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
    mesh: the devices that rows and params are split over; params are gathered over fsdp here.
    """

    def read(params: Params, *packed: Array, layer_params: LayerParams | None = None) -> dict:
        tokens, segment_ids, positions = packed
        decoder = Decoder(base, layer_params)
        output: Any = decoder.apply({"params": params}, tokens, positions, packed_mask(segment_ids))
        return output.hidden

    packed = tokens, segment_ids, positions
    # A dense base needs only whole weights: then each device computes its own rows.
    if mesh is None or not base.num_experts:
        return read(gathered(base_params, mesh), *packed)

    def read_here(params: Params, gather: Callable[..., Params], *packed: Array) -> dict:
        layers = [f"layers_{index}" for index in range(base.num_layers)]
        rest = {name: gather(name, each) for name, each in params.items() if name not in layers}
        in_turn = _gathered_in_turn(gather, [(name, params[name]) for name in layers])
        return read(rest, *packed, layer_params=in_turn)

    # Tokens are sorted by their experts: left alone, the compiler sorts all devices' tokens on each
    # device, and computes all of them.
    return over_rows_of(mesh, read_here, base_params, *packed)


def _gathered_in_turn(
    gather: Callable[..., Params], layers: list[tuple[str, Params]]
) -> LayerParams:
    """Return the `layer_params` of a Decoder that gathers a layer's while the one before runs."""
    # Params of at most one layer: `take` hands them out and starts to gather the next layer's.
    ready = [gather(*layers[0])]

    def take(index: int, x: Array) -> tuple[Params, Array]:
        params = ready.pop()
        if index + 1 < len(layers):
            # Not before this layer's input is there: the compiler gathered all experts first, and
            # they stayed in memory until it was their turn.
            name, following = layers[index + 1]
            following, x = jax.lax.optimization_barrier((following, x))
            ready.append(gather(name, following))
        return params, x

    return take
