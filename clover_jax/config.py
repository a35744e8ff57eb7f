"""Frozen dataclasses for everything static; each reads and writes JSON.

A configuration fixes shapes and therefore compiled programs: two equal configurations share
one. What changes from step to step (tokens, lengths, caches) is never here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import types
import typing
from typing import Any, ClassVar, TypeVar

C = TypeVar("C", bound="JsonConfig")


@dataclasses.dataclass(frozen=True)
class JsonConfig:
    """Base of all configurations: plain JSON objects in, plain JSON objects out."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values (tuples become lists)."""
        # Through text, so that tuples are lists as in a file.
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls: type[C], values: dict[str, Any]) -> C:
        """Build from `to_dict`'s output.

        Raises ValueError for a field that this configuration does not have, or a value of another
        type than the field's: files may have been edited.
        """
        # Checked here, since Python's own error would not list the known names.
        hints = typing.get_type_hints(cls)
        unknown = sorted(set(values) - set(hints))
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {unknown[0]!r}; its fields are {sorted(hints)}"
            )
        return cls(**{name: _revive(hints[name], value, name) for name, value in values.items()})


# What a JSON value must be for a field of each type.
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_MOST = 2.0**32  # a larger whole number overflows somewhere


def _revive(hint: Any, value: Any, name: str) -> Any:
    """Turn a JSON value back into the type of the field's annotation; ValueError for another."""
    # Of `X | None` a value that is not None is an X.
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in arms:
        return None
    hint = next(arm for arm in arms if arm is not type(None))
    if isinstance(hint, type) and issubclass(hint, JsonConfig):
        if isinstance(value, dict):
            return hint.from_dict(value)
        raise ValueError(f"{name} must be an object, not {value!r:.60}")
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, not {value!r:.60}")
        # Every tuple of a configuration has items of one type, as many as it likes.
        inner = typing.get_args(hint)[0]
        return tuple(_revive(inner, item, name) for item in value)

    # JSON's true is an int in Python. A comparison with NaN is false.
    allowed = (int, float) if hint is float else hint
    is_right = isinstance(value, allowed) and (hint is bool or not isinstance(value, bool))
    if isinstance(value, int | float) and not abs(value) < _MOST:
        is_right = False
    if not is_right:
        raise ValueError(f"{name} must be {_WANTED[hint]}, not {value!r:.60}")
    return value


@dataclasses.dataclass(frozen=True)
class RopeConfig(JsonConfig):
    """Rotary position embedding in the half-split form of the Llama family.

    theta: base of the geometric series of wavelengths.
    kind: "default", "linear" (all frequencies divided by `factor`), "llama3" (only the low ones,
        with a smooth passage between `low_freq_factor` and `high_freq_factor`), "yarn" (smooth
        between pairs that turn `beta_slow` and `beta_fast` times in the original length),
        "longrope" (each frequency divided by its own of `pair_factors`) or "proportional" (the
        frequencies of the whole head, of which the slowest pairs do not turn).
    truncate: whether YaRN's passage begins and ends at whole pairs.
    attention_factor: factor of rotated queries and keys.
    share: of each head's dimensions, the first ones, that is rotated; the rest stays
        (`partial_rotary_factor`).
        Of "proportional" it is the share of the pairs, each half a head apart (Gemma 4).
    """

    theta: float = 10_000.0
    kind: str = "default"
    # For kinds that scale. Each model sets its factor; the other defaults are Llama 3.1's, and
    # for the betas the values of YaRN's paper.
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    pair_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    share: float = 1.0

    def __post_init__(self):
        kinds = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
        if self.kind not in kinds:
            raise ValueError(f"rope kind {self.kind!r} is not one of {', '.join(kinds)}")
        # A wavelength of 0 or below would turn positions into NaN.
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(
                f"rope theta ({self.theta}) and factor ({self.factor}) must be positive"
            )


@dataclasses.dataclass(frozen=True)
class DeltaConfig(JsonConfig):
    """A gated delta net in the place of attention (`models/delta_net.py`).

    num_key_heads, num_value_heads: each key head serves a group of value heads.
    key_size, value_size: entries of a key and of a value.
    conv_size: tokens that the convolution reads, the newest one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int = 4

    def __post_init__(self):
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"the delta net's num_value_heads ({self.num_value_heads}) must be divisible by "
                f"its num_key_heads ({self.num_key_heads})"
            )
        if self.conv_size < 2:
            raise ValueError(f"the delta net's conv_size ({self.conv_size}) must be at least 2")

    @property
    def num_groups(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """What the convolution reads for one key head: a query, a key, and the group's values."""
        return 2 * self.key_size + self.num_groups * self.value_size


@dataclasses.dataclass(frozen=True)
class LayerConfig(JsonConfig):
    """One Llama-style decoder layer; the base's layers and a head's Augmenting Block share it.

    Names of Hugging Face's config.json stand behind those that differ.

    query_key_norm: RMSNorm of each head's queries and keys before they are rotated (Qwen3).
    joint_head_norm: RMSNorm of all heads' queries together, and of all keys (OLMo 2 and 3).
    value_norm: RMSNorm of each head's values, without a scale (Gemma 4).
    keys_as_values: one matrix makes keys and values, which part at their norms (Gemma 4's
        `attention_k_eq_v`).
    alibi: no rotation; scores fall with the distance, for each head at a rate of its own.
    unrotated: no rotation, and no other trace of the distance (SmolLM3's `no_rope_layers`).
    sliding_window: positions that a position sees, itself included; None is all before it.
    score_scale: factor of the products of queries and keys; None is head_dim^-0.5
        (`query_pre_attn_scalar`^-0.5).
    score_cap: scores are then bounded softly, score_cap * tanh(score / score_cap)
        (`attn_logit_softcapping`).
    pre_norms: RMSNorm of the inputs of attention and MLP; False in OLMo 2 and 3.
    post_norms: RMSNorm of the outputs of attention and MLP before they are added (Gemma 2 to 4).
    scaled_output: the layer's output is multiplied by a learned number (Gemma 4's `layer_scalar`).
    shares_keys: queries read the keys and values of an earlier layer (`num_kv_shared_layers`).
    token_size: width of an embedding of the token for this layer, which gates a branch behind the
        MLP; 0 is none (`hidden_size_per_layer_input`).
    sinks: a learned extra logit in each query head's softmax, an attention sink (gpt-oss).
    activation: of the MLP's gate: "silu", "gelu" (approximated by tanh) or "clamped" (gpt-oss).
    num_experts: MLPs of width expert_size in place of one of width intermediate_size, of which each
        token reads experts_per_token; 0 is the one MLP for all (`moe_intermediate_size`,
        `num_experts_per_tok`).
    normed_weights: whether the weights of a token's experts are made to sum up to 1
        (`norm_topk_prob`).
    expert_bias: biases of the router and of all of the experts' matrices (gpt-oss).
    router: "softmax" over all experts, or a "sigmoid" of each, where a further bias decides which
        are chosen but not what they weigh (`e_score_correction_bias`).
    routed_scale: factor of the chosen experts' output (`routed_scaling_factor`).
    shared_expert_size: width of a further MLP, which every token reads; 0 is none
        (`shared_expert_intermediate_size`).
    shared_gate: whether that MLP's output is multiplied by a learned gate.
    parallel_mlp: the one MLP is next to the experts, each with norms of its own; the router reads
        the layer's state, which it norms itself (Gemma 4).
    output_gate: attention's output is multiplied by a sigmoid of the input (Qwen3-Next).
    delta: a delta net in the place of attention; None is attention.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    # Parts that a layer of Llama does not have, turned off: `as_llama` keeps these defaults.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    joint_head_norm: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    alibi: bool = False
    unrotated: bool = False
    sliding_window: int | None = None
    score_scale: float | None = None
    score_cap: float | None = None
    pre_norms: bool = True
    post_norms: bool = False
    scaled_output: bool = False
    shares_keys: bool = False
    token_size: int = 0
    activation: str = "silu"
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normed_weights: bool = True
    expert_bias: bool = False
    sinks: bool = False
    router: str = "softmax"
    routed_scale: float = 1.0
    shared_expert_size: int = 0
    shared_gate: bool = True
    parallel_mlp: bool = False
    output_gate: bool = False
    delta: DeltaConfig | None = None

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        # Each key head serves a whole group of query heads.
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        # Rotation takes the dimensions in pairs.
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary positions")
        rotated = int(self.head_dim * self.rope.share)
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ValueError(
                f"rope share ({self.rope.share}) must rotate an even number of the {self.head_dim} "
                f"dimensions of a head, not {rotated}"
            )
        if self.rope.kind == "longrope" and len(self.rope.pair_factors) != rotated // 2:
            raise ValueError(
                f"longrope needs a factor for each of {rotated // 2} pairs of dimensions, not "
                f"{len(self.rope.pair_factors)}"
            )
        used = self.experts_per_token
        if self.num_experts and not (0 < used <= self.num_experts and self.expert_size > 0):
            raise ValueError(
                f"{self.num_experts} experts need an expert_size ({self.expert_size}) and "
                f"experts_per_token ({used}) from 1 to their number"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window ({self.sliding_window}) must be at least 1")
        if self.activation not in ("silu", "gelu", "clamped"):
            raise ValueError(f"activation {self.activation!r} is not one of silu, gelu, clamped")
        if self.router not in ("softmax", "sigmoid"):
            raise ValueError(f"router {self.router!r} is not softmax or sigmoid")

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def with_plain_branches(self) -> LayerConfig:
        """Return the layer with norms where Llama has them, so that its branches can be nothing."""
        return dataclasses.replace(self, pre_norms=True, post_norms=False, scaled_output=False)

    def as_llama(self) -> LayerConfig:
        """Return Llama's layer of the same widths."""
        names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        kept = {name: getattr(self, name) for name in (*names, "rms_norm_eps", "rope")}
        return LayerConfig(**kept)


# kw_only: fields without a default follow the layer's, which have defaults.
@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig(LayerConfig):
    """The frozen base model of the Llama family, or of one that differs by these fields.

    It has the fields that its layers share, and the fields of the model around them.

    full_attention_layers: indices of the layers without the `sliding_window`, or with attention
        where the others have a delta net (`layer_types`).
    unrotated_layers: indices of the layers without rotation (SmolLM3).
    dense_layers: indices of the layers that have one MLP where the others have experts
        (`mlp_only_layers`, `first_k_dense_replace`).
    local_rope: rotation of the layers with the window; None: as the others
        (`rope_local_base_freq`).
    local_kv_heads, local_head_dim: of the layers with the window; None: as the others (Gemma 4).
    num_sharing_layers: the last layers, which have no keys and values of their own
        (`num_kv_shared_layers`).
    sharing_size: width of their MLP; None: as the others.
    embedding_scale: factor of the tokens' embeddings (Gemma).
    logit_cap: logits are bounded softly, logit_cap * tanh(logit / logit_cap)
        (`final_logit_softcapping`).
    """

    vocab_size: int
    num_layers: int
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    full_attention_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    local_kv_heads: int | None = None
    local_head_dim: int | None = None
    num_sharing_layers: int = 0
    sharing_size: int | None = None
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def head_layer(self) -> LayerConfig:
        """The shape of a draft head's layers: the base's layers without window and experts.

        Where the base has experts, the one MLP is as wide as all that a token reads.
        """
        inner = self.experts_per_token * self.expert_size
        if not inner or self.parallel_mlp:
            inner += self.intermediate_size
        # A head drafts a few tokens beyond the text, so no window of the base concerns it.
        return dataclasses.replace(
            self._every_layer,
            sliding_window=None,
            intermediate_size=inner,
            num_experts=0,
            experts_per_token=0,
            expert_size=0,
            normed_weights=True,
            expert_bias=False,
            router="softmax",
            routed_scale=1.0,
            shared_expert_size=0,
            shared_gate=True,
            parallel_mlp=False,
            token_size=0,
            delta=None,
            mlp_bias=self.mlp_bias or self.expert_bias,
        )

    def layer_at(self, index: int) -> LayerConfig:
        """Return the config of the base's layer `index`: its shape, window and experts."""
        # Some families alternate layers with and without a window, or with and without experts.
        changes: dict[str, Any] = {}
        if index in self.full_attention_layers:
            changes |= {"sliding_window": None, "delta": None}
        elif self.sliding_window is not None:
            names = {"rope": "local_rope"}
            names |= {"num_kv_heads": "local_kv_heads", "head_dim": "local_head_dim"}
            local = {name: getattr(self, of_local) for name, of_local in names.items()}
            changes |= {name: value for name, value in local.items() if value is not None}
            changes["keys_as_values"] = False  # of the layers that see everything
        if self.layer_of_keys(index) != index:
            size = self.sharing_size or self.intermediate_size
            changes |= {"shares_keys": True, "intermediate_size": size}
        if index in self.unrotated_layers:
            changes["unrotated"] = True
        if index in self.dense_layers:
            changes["num_experts"] = 0
        return dataclasses.replace(self._every_layer, **changes)

    def layer_of_keys(self, index: int) -> int:
        """Return the layer whose keys and values layer `index` reads: its own, for most.

        Example: of layers w w f w f with a window (w) or full (f) of which the last two share keys,
        layer 3 reads the keys of 1 and layer 4 the keys of 2.
        """
        with_keys, full = self.num_layers - self.num_sharing_layers, self.full_attention_layers
        if index < with_keys:
            return index
        return max(i for i in range(with_keys) if (i in full) == (index in full))

    @property
    def _every_layer(self) -> LayerConfig:
        # A plain LayerConfig: a BaseConfig never compares equal to a head's layer.
        names = [field.name for field in dataclasses.fields(LayerConfig)]
        return LayerConfig(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class LossSpec(JsonConfig):
    """The distillation loss: sum_i w_i of the weighted terms; `training/losses.py` has them.

    regression: weight of SmoothL1(u^i, g) averaged over D.
    soft_ce: weight of the cross-entropy to the base's distribution.
    hard_ce: weight of the cross-entropy to the true token.
    total_variation: weight of the total-variation distance to the base's distribution: how often a
        token drawn from the head's is rejected.
    candidate_ce: weight of the cross-entropy to the true token among the few tokens that a head
        rescores, where it is one of them; for other heads the same as `hard_ce`.
    decay: position i weighs decay^i.
    dpace: above 0, positions weigh what they are worth for the accepted length (D-PACE) instead of
        decay^i; this is then the lowest probability that D-PACE gives a token.
    divisor: what the sum of a term over the pairs (t, i) of position i is divided by: "pairs", the
        number of these pairs; "positions", all positions of the batch; or "weights", the sum of the
        weights of these pairs.
    divisor_offset: added to the divisor.
    pairs: which pairs count (`training/pairs.py`): "decoding", those that decoding meets, or
        "release", as Clover-2's and EAGLE's code has it: an answer's first draft is left out.
    proposable: a reduced vocabulary counts soft_ce and total_variation where it has the "text"'s
        next token, or where it has the "base"'s most probable one, which needs all its logits.
    """

    regression: float = 0.0
    soft_ce: float = 0.0
    hard_ce: float = 0.0
    total_variation: float = 0.0
    candidate_ce: float = 0.0
    # How the terms and the positions are weighed.
    decay: float = 1.0
    dpace: float = 0.0
    divisor: str = "pairs"
    divisor_offset: float = 1.0
    pairs: str = "decoding"
    proposable: str = "text"

    def __post_init__(self):
        choices = {"pairs": ("decoding", "release"), "proposable": ("text", "base")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"loss {name} {getattr(self, name)!r} must be {' or '.join(known)}"
                )
        # EAGLE-3 divides by all positions, DFlash 2 by weights, the other methods by what counts.
        if self.divisor not in ("pairs", "positions", "weights"):
            raise ValueError(f"loss divisor {self.divisor!r} must be pairs, positions or weights")
        if self.dpace and self.divisor == "weights":
            raise ValueError("loss divisor weights sums up decay^i: with dpace it must be pairs")
        if not 0 <= self.dpace <= 1:
            raise ValueError(f"loss dpace ({self.dpace}) must lie in 0 .. 1; 0 weighs by decay")
        # A weight below 0 would train the head away from the base. NaN is refused too.
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"loss {name} ({value}) must be at least 0, and finite")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LossSpec:
        """Build from `to_dict`'s output, also that of versions with more terms.

        Raises ValueError for a dropped term that the head was trained with.
        """
        # A head may have a term that it does not use.
        values = dict(values)
        values.pop("lk_eta", None)
        for name in ("neg_log_acceptance", "lk", "label_mask"):
            value = values.pop(name, None)
            if value:
                raise ValueError(
                    f"loss {name} ({value}) was dropped from training; set it to 0 in the head's "
                    "draft.json, since decoding does not use it"
                )
        return super().from_dict(values)


MOST_PARTS = 10_000  # a larger number is a mistake, and would take all memory before it is found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(JsonConfig):
    """What the engine and the trainer know of any drafter.

    kind: the registry name ("clover2", ...).
    num_positions: P, the draft positions it was trained for.
    features: base activations it reads, in order of concatenation: "pre_norm" (h),
        "post_norm" (g), or "layer_3" (the state entering layer 3).
    max_depth: deepest tree it can draft; None where later positions share weights.
    draft_to_target: ids of a reduced draft vocabulary, ascending, or None for the base's own.
    embedding_scale, logit_cap: the base's, for heads that read its embedding or its lm_head.
    base_layer: the base's layer that decoder layers begin as; None is the last.
    default_tree: of a kind of head that no training measures; None for the usual one.
    """

    default_tree: ClassVar[str | None] = None
    kind: str
    layer: LayerConfig
    vocab_size: int
    num_positions: int = 5
    features: tuple[str, ...] = ("pre_norm",)
    max_depth: int | None = None
    draft_to_target: tuple[int, ...] | None = None
    loss: LossSpec = LossSpec()
    # These come from the base; `registry.of_base` sets them.
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    base_layer: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if name.startswith("num_") and isinstance(value, int) and value > MOST_PARTS:
                raise ValueError(f"{name} ({value}) must be at most {MOST_PARTS}")
        for name in ("num_positions", "max_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        states = re.compile(r"pre_norm|post_norm|layer_\d{1,5}")
        if wrong := [name for name in self.features if not states.fullmatch(name)]:
            raise ValueError(
                f"features have {wrong[0]!r}; they are pre_norm, post_norm and layer_N"
            )
        table = self.draft_to_target
        # The head proposes from the whole vocabulary.
        if table is None:
            return
        # Ascending, so that the lowest id comes first among equals in either vocabulary.
        ascends = all(a < b for a, b in itertools.pairwise(table))
        if not table or not ascends or table[0] < 0 or table[-1] >= self.vocab_size:
            raise ValueError(
                f"draft_to_target ({len(table)} ids) must ascend and lie in 0 .. "
                f"{self.vocab_size - 1}"
            )

    @property
    def draft_vocab_size(self) -> int:
        """Vd: tokens that the head can propose."""
        return self.vocab_size if self.draft_to_target is None else len(self.draft_to_target)
