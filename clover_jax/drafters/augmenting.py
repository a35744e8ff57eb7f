"""Clover's Augmenting Block: decoder layers of the base's shape over the whole prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.config import DrafterConfig
from clover_jax.drafters.attention_decoder import l2_normalize
from clover_jax.drafters.drafter import AcceptedPositions
from clover_jax.models.cache import Cache, ordered_after, write_rows
from clover_jax.models.decoder import DecoderLayer, causal_mask
from clover_jax.models.placement import over_rows_and_heads

# The parts of a layer of attention and one MLP.
PLAIN = {"attention_norm", "attention", "attention_post_norm"}
PLAIN |= {"mlp_norm", "mlp", "mlp_post_norm", "scale"}


def augment(
    layers: Sequence[DecoderLayer],
    x: Float[Array, "B A D"],
    positions: Int[Array, "B A"],
    mask: Bool[Array, "B A A"],
    cache: Cache | None = None,
    length: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B A D"], Cache]:
    """Run the layers one after another; return their output and their fresh keys and values."""
    # Later layers read the cache of their own depth.
    fresh = []
    for index, layer in enumerate(layers):
        x, rows = layer(x, positions, mask, None if cache is None else cache[index], length)
        fresh.append(rows)
    return x, tuple(fresh)


def check_depth(num_augmenting_layers: int, least_layers: int = 1) -> None:
    """Raise ValueError for a head with fewer layers than it needs."""
    if num_augmenting_layers < least_layers:
        raise ValueError(
            f"num_augmenting_layers ({num_augmenting_layers}) must be at least {least_layers}"
        )


def take_last(x: Float[Array, "B A D"], count: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """Return the last of the first count[b] positions of each row."""
    # A row with nothing accepted reads position 0; its state is not used.
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, last, axis=1)


def run_trunk(
    trunk: Callable[..., tuple[Array, Cache]], accepted: AcceptedPositions, cache: Cache
) -> tuple[Float[Array, "B 1 D"], Cache]:
    """Run a trunk over accepted positions and commit its keys and values.

    trunk: (positions [B, A], mask [B, A, A], cache, length [B]) -> z [B, A, D] and its fresh keys
        and values.
    Returns z at the last accepted position, and the cache.
    """
    # All A positions run through the trunk, valid or not: shapes stay the same at every step.
    start, (batch, size) = accepted.start, accepted.next_tokens.shape
    positions = start[:, None] + jnp.arange(size)
    # Rows past count[b] come last, so the causal mask keeps them from the valid ones.
    z, fresh = trunk(positions, causal_mask(batch, size), cache, start)
    last = take_last(z, accepted.count)
    write_at = ordered_after(start, last)
    return last, over_rows_and_heads(write_rows, cache, fresh, write_at)


def silent_layers(config: DrafterConfig, base_params: Params, num_layers: int) -> Params:
    """Return augmenting_0 .. as the base's last layers, in their order, adding nothing at first.

    They read as the base's layers do, so they train quickly. The matrices that write are zero: the
    state passes through, whatever its size relative to what the base's layers add.
    """
    layers = from_last_layer(config, base_params, num_layers, in_order=True)
    # Where the base's layers have no norms before their branches, these begin as 1.
    plain = {"scale": jnp.ones_like(base_params["final_norm"]["scale"])}
    return {
        name: {
            "attention_norm": layer.get("attention_norm", plain),
            "attention": silent(layer["attention"]),
            "mlp_norm": layer.get("mlp_norm", plain),
            "mlp": silent(layer["mlp"]),
        }
        for name, layer in layers.items()
    }


def silent(params: Params) -> Params:
    """Return an attention's or an MLP's params with which it adds nothing to the state."""
    writing = {"out", "out_bias", "down", "down_bias", "expert_down", "expert_down_bias"}
    return jax.tree.map_with_path(
        lambda path, x: jnp.zeros_like(x) if path[-1].key in writing else x, params
    )


def unit_rms(x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """Return x scaled to a mean square of 1."""
    length = x.shape[-1] ** 0.5  # without an eps that counts: rows of lm_head may be small
    return (length * l2_normalize(x.astype(jnp.float32), 1e-6)).astype(x.dtype)


def initial_state_size(base_params: Params) -> Float[Array, " 1"]:
    """Return the rms at which a base's states enter a head, [1]: L / 4, and at least 1.

    L is the rms length of a row of lm_head times the final norm's scale: how far a change of a
    unit state moves logits. L is 2 to 4 for the small bases on which learning rates were tuned and
    51 for Gemma 3 270M, where additions to a unit state diverged within ten steps.
    """
    lm_head = base_params.get("lm_head", base_params["embedding"])
    squares = jnp.mean(lm_head.astype(jnp.float32) ** 2, axis=0)
    scale = base_params["final_norm"]["scale"].astype(jnp.float32)
    return jnp.maximum(jnp.sqrt(jnp.sum(squares * scale**2)) / 4, 1)[None]


def from_last_layer(
    config: DrafterConfig, base_params: Params, num_layers: int, in_order: bool = False
) -> Params:
    """Return augmenting_0 .. as copies of the base's last layer that rotates as they do.

    in_order: of the last `num_layers` of its shapes up to that one instead, one each, however they
        rotate; a base of fewer repeats the first of them.
    Of experts the first few become one MLP, as many as a token reads, each counting as much: what
    the layer gives where its router prefers none. They follow an MLP next to the experts, if any.
    """
    # The deepest layers are nearest to what the head predicts.
    names = [name for name in base_params if name.startswith("layers_")]
    indices = sorted(int(name.removeprefix("layers_")) for name in names)
    chosen = indices[-1] if config.base_layer is None else config.base_layer

    # Bases with experts may have layers without, whose MLP has another width.
    upto = [base_params[f"layers_{i}"] for i in indices if i <= chosen]
    shapes = [jax.tree.map(lambda matrix: matrix.shape, layer) for layer in upto]
    alike = [layer for layer, shape in zip(upto, shapes, strict=True) if shape == shapes[-1]]

    new = {}
    for i in range(num_layers):
        back = num_layers - 1 - i if in_order else 0
        layer = alike[max(len(alike) - 1 - back, 0)]
        if "router" in layer["mlp"]:
            layer = {**layer, "mlp": _first_experts(layer["mlp"], config.layer.intermediate_size)}
        elif "experts" in layer:
            one = layer["mlp"]
            few = _first_experts(
                layer["experts"], config.layer.intermediate_size - len(one["down"])
            )
            sides = {"gate_up": 2, "down": 0}
            both = {x: jnp.concatenate([one[x], few[x]], axis) for x, axis in sides.items()}
            layer = {**layer, "mlp": both}
        if layer.keys() - PLAIN:
            layer = {name: layer[name] for name in layer if name in PLAIN}
        new[f"augmenting_{i}"] = layer
    return new


def _first_experts(mlp: Params, inner: int) -> Params:
    """Return a `GatedMLP` of width `inner` made of whole experts."""
    _, width, size = mlp["expert_gate"].shape
    # Side by side the experts [k, D, F] are one MLP of width k F.
    count = inner // size
    gate, up = (
        jnp.moveaxis(mlp[name][:count], 0, 1).reshape(width, inner)
        for name in ("expert_gate", "expert_up")
    )
    down = mlp["expert_down"][:count].reshape(inner, width) / count
    dense = {"gate_up": jnp.stack([gate, up], axis=1), "down": down}
    if "router_bias" not in mlp:
        return dense

    sides = [mlp[f"expert_{side}_bias"][:count].reshape(-1) for side in ("gate", "up")]
    mean = mlp["expert_down_bias"][:count].mean(axis=0)
    return dense | {"gate_up_bias": jnp.stack(sides), "down_bias": mean}
