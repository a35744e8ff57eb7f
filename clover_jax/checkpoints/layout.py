"""A third-party layout of draft heads as data, and the Llama config that several layouts share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.config_json import tell_unknown
from clover_jax.checkpoints.llama_config import ORIGINAL, parse_llama_config
from clover_jax.checkpoints.tensor_map import Leaf
from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say


@dataclasses.dataclass(frozen=True)
class Layout:
    """One format of draft heads; the functions take the config of the kind of head that it holds.

    name: used in reports of `convert`, and the value of its `--to`, unless `written_as` is that.
    kind: the drafter whose heads it holds.
    parse_config: the head's config, from the fields of config.json, its path (for messages, and
        for tensors next to it) and the base's config. Raises UserError for missing or impossible
        fields.
    leaves: the place of the stored tensors in the head's params.
    config_fields: the content of config.json for a head of a base.
    check_exportable: raises UserError for a head that readers of the layout would run differently.
    copies: stored names of frozen copies of base matrices -> "lm_head" or "embedding".
    more_tensors: stored tensors that follow from the config.
    optional: names of redundant tensors that may be stored.
    family: the `model_type` whose fields config.json has.
    classes: architectures that its tools write; others are named. Empty for any.
    fields: further fields, which are read or which servers write for themselves; see
        `tell_unknown`. Others are named.
    offset: what is added to a stored tensor, by its name.
    file: the name of the weights' file.
    warning: printed when this layout is written.
    written_as: a value of `--to` that selects one layout for each of several kinds.
    """

    name: str
    kind: str
    # Any stands for a config of this layout's `kind`.
    parse_config: Callable[[dict[str, Any], Path, BaseConfig], Any]
    leaves: Callable[[Any], list[Leaf]]
    config_fields: Callable[[Any, BaseModel], dict[str, Any]]
    check_exportable: Callable[[Any, BaseConfig], None]
    # Only some layouts need the following fields.
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more_tensors: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}
    optional: tuple[str, ...] = ()
    family: str = "llama"
    classes: tuple[str, ...] = ()
    fields: Mapping[str, Set[str] | None] = dataclasses.field(default_factory=dict)
    offset: Callable[[str], float] = lambda name: 0.0
    file: str = "model.safetensors"
    warning: str | None = None
    written_as: str | None = None

    @property
    def to(self) -> str:
        """The value of `convert --to`."""
        return self.written_as or self.name


# A head's `model_type` that says no more than its layout, in addition to the kind's own name.
_PLAIN_TYPES = {None, "speculators", "speculator_model", "dflash"}


def tell_unread(values: dict[str, Any], path: Path, layout: Layout) -> None:
    """Name the fields of a head's config that neither its reader nor the layout's tools know."""
    tell_unknown(values, path, layout.family, layout.fields)
    kind, classes = values.get("model_type"), values.get("architectures") or []
    if kind not in _PLAIN_TYPES | {layout.family, layout.kind}:
        say(f"{path}: model_type {kind!r} is not read: layers are read as {layout.family}'s")
    strange = [name for name in classes if layout.classes and name not in layout.classes]
    if strange:
        say(f"{path}: architectures {strange} is read as {layout.classes[0]} ({layout.name})")


def refuse_draft_vocabulary(config: DrafterConfig, layout: str) -> None:
    """Raise UserError for a head over a part of the vocabulary, which few layouts can store."""
    if config.draft_to_target is not None:
        raise UserError(
            f"this head drafts over {config.draft_vocab_size} of the base's {config.vocab_size} "
            f"tokens, and the {layout} layout has no draft vocabulary; train one without "
            "--draft_vocab to export it"
        )


# The fields of each type of rotation, in addition to its factor; `beyond_llama` refuses others.
_ROPE_FIELDS = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", ORIGINAL),
}


def llama_fields(config: DrafterConfig, base: BaseConfig) -> dict[str, Any]:
    """Return the fields of config.json for the layer of a head."""
    layer, rope = config.layer, config.layer.rope
    scaling = None
    if rope.kind != "default":
        own = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.kind]}
        scaling = {"rope_type": rope.kind, "factor": rope.factor} | own

    # The ids of special tokens and the context are the base's: the head has the same text.
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "max_position_embeddings": base.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        # Every other activation was refused by `beyond_llama`.
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": list(base.eos_token_ids) or None,
        # Llama has one field for q, k, v and o; layouts where these may differ add or check more.
        "attention_bias": layer.output_bias,
        "mlp_bias": layer.mlp_bias,
    }


def eagle_fields(config: DrafterConfig, base: BaseConfig, architecture: str) -> dict[str, Any]:
    """Return `llama_fields` and the further fields of all EAGLE layouts."""
    layer = config.layer
    more = {"head_dim": layer.head_dim, "qkv_bias": layer.qkv_bias}
    return {"architectures": [architecture], **llama_fields(config, base), **more}


def read_eagle_layer(values: dict[str, Any], path: Path) -> LayerConfig:
    """Return an EAGLE head's layer; raises UserError for missing or impossible fields."""
    llama = parse_llama_config(values, path)
    layers = values["num_hidden_layers"]
    if layers != 1:
        raise UserError(f"{path}: num_hidden_layers is {layers}; an EAGLE head has 1")
    # A field of this program: Llama's attention_bias is for all four projections.
    qkv_bias = bool(values.get("qkv_bias", llama.qkv_bias))
    return dataclasses.replace(llama.head_layer, qkv_bias=qkv_bias)


# Fields of a layer that no Llama config has, so a reader would silently ignore them.
_BEYOND_LLAMA = {
    "alibi": "ALiBi",
    "query_key_norm": "query and key norms",
    "joint_head_norm": "norms over all heads",
    "value_norm": "normed values",
    "keys_as_values": "keys as values",
    "score_scale": "its own scale of scores",
    "score_cap": "soft-capped scores",
    "pre_norms": "no norms before attention and MLP",
    "post_norms": "norms after attention and MLP",
    "scaled_output": "a scaled output",
    "sinks": "attention sinks",
    "output_gate": "gated attention",
    "activation": "an activation of its own",
}


def beyond_llama(layer: LayerConfig) -> str | None:
    """Return in words which feature of a layer Llama's layers lack; None for a Llama layer."""
    # `as_llama` keeps the rotation, so the comparison below would not see a difference in it.
    if layer.rope.kind in ("longrope", "proportional") or layer.rope.share != 1:
        return "a rotation of Phi's or Gemma 4's kind"
    llama = layer.as_llama()
    names = (name for name in _BEYOND_LLAMA if getattr(layer, name) != getattr(llama, name))
    return next((_BEYOND_LLAMA[name] for name in names), None)


def check_llama_layer(layer: LayerConfig) -> None:
    """Raise UserError for a layer that readers of the EAGLE layouts would run differently."""
    if beyond := beyond_llama(layer):
        # A Llama layer keeps the rotation of its base.
        advice = "; train with --drafter_options=llama_layer=true to export it"
        raise UserError(
            f"this head has {beyond}, as its base has, but the EAGLE layouts hold heads of Llama's "
            f"layers only{'' if beyond_llama(layer.as_llama()) else advice}"
        )
