"""EAGLE-1, -2 and -3 heads: a Llama config, one layer and `fc`, for EAGLE, vLLM and SGLang.

Sources: EAGLE's repository; llama_eagle.py of vLLM (for the method "eagle") and of SGLang. Readers
rotate with the config's `rope_theta`, or with 10 000 without it.

EAGLE-1 and -2: `embed_tokens` is a copy of the base's input embedding; output matrix and final norm
are the base's own and not stored. EAGLE's readers build `fc` with a bias unless the config has
`"bias": false`. vLLM builds it without a bias and fails on a stored one. SGLang always builds it
with a bias and does not initialize a missing one. SGLang has its own name for the class, and its
field `bias` means biases of q, k, v and o, all of them or none. Either folder is read back as an
EAGLE head.

EAGLE-3: the layer is called `midlayer`, and the head has its own norm and output matrix. `d2t`
holds offsets (target id = draft id + d2t), `t2d` marks the kept target ids. A head over the whole
vocabulary is written without them, as vLLM 0.32.0 requires, and read with or without. The embedding
is the base's and not stored. `fc` reads the three states that enter the base's layers 2, L // 2 and
L - 3, which are not in the config.

tpu-inference 0.32 has a JAX class of its own for the same tensors. It knows the class's name of
vLLM, always wants `d2t`, has no place for biases, and gives every head the method's own states.

The layout of vLLM's speculators (sources: the library's schema and vLLM's reader) has a config of
its own and official tensors. EAGLE-3's layer is called `layers.0.`, not `midlayer.`, and the base's
embedding is stored with it. `norm_before_residual` is always written: without it vLLM takes true
and the schema false. Our heads, like the method's own, add to the state as it was before its norm.
A state that a head reads has the id of the layer that it enters; vLLM 0.32.0 also offers the state
after the last layer, under the id `num_layers`, which short bases need. EAGLE-1 heads were in the
library's first version only.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.config_json import tell_unknown
from clover_jax.checkpoints.layout import (
    Layout,
    check_llama_layer,
    eagle_fields,
    read_eagle_layer,
    refuse_draft_vocabulary,
)
from clover_jax.checkpoints.llama_tensors import layer_leaves, norm_leaf
from clover_jax.checkpoints.loading import architecture_of
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.checkpoints.tensor_map import Leaf, over_states, whole
from clover_jax.config import BaseConfig
from clover_jax.drafters import eagle, eagle3
from clover_jax.drafters.eagle import EagleConfig
from clover_jax.drafters.eagle3 import NUM_FEATURES, Eagle3Config, feature_layers
from clover_jax.errors import UserError
from clover_jax.runtime.files import read_json_object

EMBEDDING = "embed_tokens.weight"  # a frozen copy of the base's
OFFSETS, KEPT = "d2t", "t2d"
# Fields of servers: which states a head reads, and whether it adds to the state after its norm.
STATES, NORM_FIRST = "eagle_aux_hidden_state_layer_ids", "norm_before_residual"
# Fields of the programs that train EAGLE-3 heads: another value makes another head of the same
# tensors. They stand outside or in `eagle_config`.
_METHOD = {
    **dict.fromkeys((NORM_FIRST, "norm_before_fc", "fc_norm", "norm_output"), False),
    **dict.fromkeys(("use_aux_hidden_state", "use_last_layernorm"), True),
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
_OWN_FIELDS = dict.fromkeys(("bias", "qkv_bias"))
_CLASSES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
_CLASSES3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_EAGLE3_FIELDS = {
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size", "qkv_bias", STATES, *_METHOD)),
    "eagle_config": {STATES, *_METHOD},
}


def parse_eagle(values: dict[str, Any], path: Path, base: BaseConfig) -> EagleConfig:
    """Turn the fields of an EAGLE-1 head's config into ours."""
    return EagleConfig(
        layer=read_eagle_layer(values, path),
        vocab_size=values["vocab_size"],
        # EAGLE's own readers take true where it is absent.
        fc_bias=bool(values.get("bias", True)),
        # The layout stores no loss; further training uses the method's.
        loss=eagle.METHOD_LOSS,
    )


def check_eagle(config: EagleConfig, base: BaseConfig) -> None:
    """Raise UserError for a head that EAGLE's readers would run differently."""
    refuse_draft_vocabulary(config, "EAGLE-1")
    check_llama_layer(config.layer)


def eagle_leaves(config: EagleConfig) -> list[Leaf]:
    """Return the place of the official tensors in the params of `drafters.eagle.Eagle`."""
    width = config.layer.hidden_size
    leaves = [over_states(("fc",), "fc.weight", 2, width)]  # embedding, then state
    if config.fc_bias:
        leaves.append(whole(("fc_bias",), "fc.bias", (width,)))
    # The output of `fc` enters the layer's attention without a norm.
    return leaves + layer_leaves(config.layer, ("layer",), "layers.0.", input_norm=False)


def _check_for_vllm(config: EagleConfig, base: BaseConfig) -> None:
    check_eagle(config, base)
    # Zeros could be left out; a trained bias cannot.
    if config.fc_bias:
        raise UserError(
            "this head's fc has a bias, and vLLM's reader of EAGLE-1 heads has none; train with "
            "--drafter_options=fc_bias=false to export it"
        )


def _check_for_sglang(config: EagleConfig, base: BaseConfig) -> None:
    check_eagle(config, base)
    # The only field for biases of SGLang's layer is attention_bias.
    layer = config.layer
    if layer.mlp_bias or layer.qkv_bias != layer.output_bias:
        raise UserError(
            f"this head's layer has qkv_bias {layer.qkv_bias}, output_bias {layer.output_bias} and "
            f"mlp_bias {layer.mlp_bias}, but SGLang's has one attention_bias and none in its MLP; "
            "train with --drafter_options=llama_layer=true to export it"
        )


def parse_eagle3(values: dict[str, Any], path: Path, base: BaseConfig) -> Eagle3Config:
    """Turn the fields of an EAGLE-3 head's config into ours, with its tensors d2t and t2d."""
    layer = read_eagle_layer(values, path)
    # The size is checked first: the tensors' shapes are compared with it.
    size, vocab_size = values.get("draft_vocab_size"), values["vocab_size"]
    if type(size) is not int or not 1 <= size <= vocab_size:
        raise UserError(
            f"{path}: draft_vocab_size must be a whole number from 1 to vocab_size, not {size!r}"
        )

    # Fields of servers can make another head of the same tensors.
    features = feature_layers(base.num_layers)
    states = [all_states(base).index(name) for name in features]
    object_ = values.get("eagle_config")
    own = object_ if isinstance(object_, dict) else {}
    # vLLM's ids name the layers that states enter, SGLang's, in an object, those that they leave.
    # An empty list stands for the method's own states.
    for ids, wanted in ((values.get(STATES), states), (own.get(STATES), [i - 1 for i in states])):
        if ids and ids != wanted:
            raise UserError(
                f"{path}: {STATES} is {ids!r}; only heads of the method's own states, {wanted} of "
                f"a base of {base.num_layers} layers, can be read"
            )
    for fields in (values, own):
        for name, is_so in _METHOD.items():
            if fields.get(name) not in (None, is_so):
                raise UserError(f"{path}: {name} is {fields[name]!r}, and must be {is_so}")
    return Eagle3Config(
        layer=layer,
        vocab_size=vocab_size,
        features=features,
        draft_to_target=_read_vocabulary(TensorFiles(path.parent), size, vocab_size),
        loss=eagle3.METHOD_LOSS,
    )


def _read_vocabulary(files: TensorFiles, size: int, vocab_size: int) -> tuple[int, ...] | None:
    """Return the target ids of the draft vocabulary, or None for the whole vocabulary."""
    # A head over the whole vocabulary may come with the tables or without.
    if size == vocab_size and not {OFFSETS, KEPT} & set(files.shapes):
        return None
    wanted = {OFFSETS: ((size,), "I64"), KEPT: ((vocab_size,), "BOOL")}
    for name, (shape, _) in wanted.items():
        if files.shapes.get(name) != shape:
            raise UserError(
                f"{files.directory}: tensor {name} must have shape {shape}, as config.json says; "
                f"found {files.shapes.get(name, 'none')}"
            )

    # Both hold the same ids; where they disagree, no reader can be right.
    offsets, kept = (files.read(name, types=(kind,)) for name, (_, kind) in wanted.items())
    ids = np.arange(size) + offsets
    if not np.array_equal(ids, np.flatnonzero(kept)):
        raise UserError(
            f"{files.directory}: d2t and t2d disagree: draft ids + d2t must be the ids that t2d "
            "marks, in ascending order"
        )
    return None if size == vocab_size else tuple(ids.tolist())


def all_states(base: BaseConfig) -> list[str]:
    """Return our names of the states; vLLM's id of a state is the number of layers before it."""
    return [*(f"layer_{index}" for index in range(base.num_layers)), "pre_norm"]


def vocabulary_tensors(config: Eagle3Config, always: bool = False) -> dict[str, np.ndarray]:
    """Return d2t and t2d; nothing for a head over the whole vocabulary, unless `always`."""
    # vLLM has a place for them only where the vocabularies differ.
    if config.draft_to_target is None and not always:
        return {}
    ids = np.array(config.draft_to_target or range(config.vocab_size), np.int64)
    kept = np.isin(np.arange(config.vocab_size), ids)
    # d2t holds offsets: a reader adds the draft id to get the target id.
    return {OFFSETS: ids - np.arange(len(ids)), KEPT: kept}


def _check_eagle3(config: Eagle3Config, base: BaseConfig) -> None:
    check_llama_layer(config.layer)

    # The layout does not name the states that a head reads, so they must be the method's. For a
    # small base `feature_layers` uses others, which readers do not.
    count = base.num_layers
    states = tuple(f"layer_{i}" for i in (2, count // 2, count - 3))
    if config.features != states:
        raise UserError(
            f"this head reads {', '.join(config.features)}, but readers of the official EAGLE-3 "
            f"layout give it {', '.join(states)} of a base of {count} layers"
        )


def _check_for_tpu_inference(config: Eagle3Config, base: BaseConfig) -> None:
    _check_eagle3(config, base)
    layer = config.layer
    if layer.qkv_bias or layer.output_bias or layer.mlp_bias:
        raise UserError(
            "this head's layer has biases, and tpu-inference's EAGLE-3 has none; train with "
            "--drafter_options=llama_layer=true to export it"
        )


def eagle3_leaves(config: Eagle3Config, prefix: str = "midlayer.") -> list[Leaf]:
    """Return the place of the official tensors; `prefix` begins the names of the layer's."""
    width = config.layer.hidden_size
    return [
        over_states(("fc",), "fc.weight", NUM_FEATURES, width),
        # Two norms in place of the layer's own; its attention reads both outputs, 2 D wide.
        norm_leaf(("embedding_norm",), f"{prefix}input_layernorm", width),
        norm_leaf(("state_norm",), f"{prefix}hidden_norm", width),
        *layer_leaves(config.layer, (), prefix, input_norm=False, read_width=2 * width),
        norm_leaf(("output_norm",), "norm", width),
        # A matrix of its own, with a row for each token of the draft vocabulary.
        whole(("lm_head",), "lm_head.weight", (config.draft_vocab_size, width)),
    ]


def eagle1_fields(config: EagleConfig, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for an EAGLE-1 head of a base."""
    # Servers pick their reader by this class and by their own setting of the method.
    return eagle_fields(config, base.config, "LlamaForCausalLM") | {"bias": config.fc_bias}


EAGLE = Layout(
    name="eagle",
    kind="eagle",
    parse_config=parse_eagle,
    leaves=eagle_leaves,
    config_fields=eagle1_fields,
    check_exportable=check_eagle,
    copies={EMBEDDING: "embedding"},
    fields=_OWN_FIELDS,
    classes=_CLASSES,
)
# Variants for two servers, which are written differently; when read, they are all EAGLE.
VLLM = dataclasses.replace(EAGLE, name="eagle_vllm", check_exportable=_check_for_vllm)
SGLANG = dataclasses.replace(
    EAGLE,
    name="eagle_sglang",
    config_fields=lambda config, base: eagle_fields(config, base.config, "LlamaForCausalLMEagle"),
    check_exportable=_check_for_sglang,
    # SGLang would use uninitialized memory for a missing bias.
    more_tensors=lambda config: (
        {} if config.fc_bias else {"fc.bias": np.zeros(config.layer.hidden_size, np.float32)}
    ),
)
EAGLE3 = Layout(
    name="eagle3",
    kind="eagle3",
    parse_config=parse_eagle3,
    leaves=eagle3_leaves,
    config_fields=lambda config, base: (
        eagle_fields(config, base.config, "LlamaForCausalLMEagle3")
        | {"draft_vocab_size": config.draft_vocab_size}
    ),
    check_exportable=_check_eagle3,
    more_tensors=vocabulary_tensors,
    optional=(OFFSETS, KEPT),
    fields=_EAGLE3_FIELDS,
    classes=_CLASSES3,
)
EAGLE3_TPU = dataclasses.replace(
    EAGLE3,
    name="eagle3_tpu",
    config_fields=lambda config, base: (
        EAGLE3.config_fields(config, base) | {"architectures": ["Eagle3LlamaForCausalLM"]}
    ),
    check_exportable=_check_for_tpu_inference,
    more_tensors=functools.partial(vocabulary_tensors, always=True),
)


VERSION = "0.1.0"
DRAFTED_TOKENS = 5  # a server's default number of tokens to draft with an EAGLE-1 head
_ALGORITHM, _LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
_SPECULATORS_FIELDS = _EAGLE3_FIELDS | dict.fromkeys(
    (_ALGORITHM, _LAYER_CONFIG, "speculators_version", "speculators_config", "layernorms")
    + ("fusion_bias", "transformer_layer_architecture", "embed_requires_grad")
)


def _parse_speculators_eagle3(values: dict[str, Any], path: Path, base: BaseConfig) -> Eagle3Config:
    layer = _layer_config(values, path)
    # Absent means true to vLLM and false to the schema, so only a written false is certain.
    if values.get(NORM_FIRST) is not False:
        raise UserError(
            f"{path}: {NORM_FIRST} is {values.get(NORM_FIRST, 'missing')}; only heads with false "
            "can be read, which add to the state as it was before its norm"
        )
    # EAGLE-3's own reader looks for the size among the fields of the layer.
    fields = layer | {"draft_vocab_size": values.get("draft_vocab_size")}
    fields |= {name: values[name] for name in _METHOD if name in values}
    config = parse_eagle3(fields, path, base)
    ids = values.get(STATES)
    if not ids:  # to vLLM a config without them, or with an empty list, means the method's own
        return config

    # An id that is not a state of this base shows that the head belongs to another one.
    names = all_states(base)
    if not _are_states(ids) or not set(ids) <= set(range(len(names))):
        raise UserError(
            f"{path}: {STATES} must be {NUM_FEATURES} different ids from 0 to {base.num_layers}, "
            f"the number of the base's layers, in ascending order, not {ids!r}"
        )
    return dataclasses.replace(config, features=tuple(names[index] for index in ids))


def _layer_config(values: dict[str, Any], path: Path) -> dict[str, Any]:
    # The library has other algorithms, whose heads have nothing in common with these.
    algorithm = values[_ALGORITHM]
    if algorithm not in ("eagle", "eagle3"):
        raise UserError(
            f"{path}: {_ALGORITHM} {algorithm!r} cannot be read, only 'eagle' and 'eagle3'"
        )
    layer = values.get(_LAYER_CONFIG)
    if not isinstance(layer, dict):
        raise UserError(f"{path} has no {_LAYER_CONFIG} object")
    tell_unknown(layer, path, "llama", _OWN_FIELDS)
    return layer


def _are_states(ids: Any) -> bool:
    # vLLM returns states while it runs the layers: each once, in their order.
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        return False
    return len(ids) == NUM_FEATURES and ids == sorted(set(ids))


def _speculators_fields(config: EagleConfig | Eagle3Config, base: BaseModel) -> dict[str, Any]:
    """Return the content of config.json for a head of a base."""
    algorithm, drafted_tokens = config.kind, DRAFTED_TOKENS
    if isinstance(config, Eagle3Config):
        drafted_tokens = config.num_positions
        own = {
            "architectures": ["Eagle3Speculator"],
            STATES: _state_ids(config, base.config),
            _LAYER_CONFIG: eagle_fields(config, base.config, "LlamaForCausalLM"),
        }
    else:
        own = {
            "architectures": ["EagleSpeculator"],
            # Only EAGLE-3 heads have ids of states; this head reads the base's last state.
            STATES: None,
            "layernorms": False,
            "fusion_bias": config.fc_bias,
            "transformer_layer_architecture": "LlamaDecoderLayer",
            _LAYER_CONFIG: eagle1_fields(config, base),
        }

    # Defaults of a server, which its user can override.
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    # vLLM loads the base named here where a user names the head alone.
    path = base.directory / "config.json"
    architecture = architecture_of(read_json_object(path), path)
    return {
        _ALGORITHM: algorithm,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        NORM_FIRST: False,
        "target_hidden_size": config.layer.hidden_size,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base.source, "architectures": [architecture]},
        },
    } | own


def _check_speculators_eagle3(config: Eagle3Config, base: BaseConfig) -> None:
    check_llama_layer(config.layer)
    # Called for its error, before anything is written.
    _state_ids(config, base)
    # vLLM does not know our own field for biases of q, k and v alone.
    if config.layer.qkv_bias != config.layer.output_bias:
        raise UserError(
            f"this head's layer has qkv_bias {config.layer.qkv_bias} and output_bias "
            f"{config.layer.output_bias}, but vLLM's has one attention_bias for both; train with "
            "--drafter_options=llama_layer=true to export it"
        )


def _state_ids(config: Eagle3Config, base: BaseConfig) -> list[int]:
    # Two features may be the same state in a base of two layers.
    names = all_states(base)
    read = [names.index(name) for name in config.features if name in names]
    if not _are_states(read):
        raise UserError(
            f"this head reads {', '.join(config.features)} of its base, but vLLM gives heads the "
            f"states that enter {NUM_FEATURES} different layers, or that leave the last one, in "
            "ascending order"
        )
    return read


SPECULATORS = Layout(
    name="speculators",
    kind="eagle",
    # The bias of fc has another name here.
    parse_config=lambda values, path, base: parse_eagle(
        _layer_config(values, path) | {"bias": values.get("fusion_bias", False)}, path, base
    ),
    leaves=eagle_leaves,
    config_fields=_speculators_fields,
    check_exportable=check_eagle,
    copies={EMBEDDING: "embedding"},
    warning=(
        "no current vLLM reads EAGLE-1 heads as speculators (0.32.0 does not); "
        "--to=eagle_vllm writes one that it reads"
    ),
    fields=_SPECULATORS_FIELDS,
    classes=("EagleSpeculator",),
)
SPECULATORS_EAGLE3 = Layout(
    name="speculators_eagle3",
    written_as="speculators",
    kind="eagle3",
    parse_config=_parse_speculators_eagle3,
    leaves=functools.partial(eagle3_leaves, prefix="layers.0."),
    config_fields=_speculators_fields,
    check_exportable=_check_speculators_eagle3,
    copies={EMBEDDING: "embedding"},
    more_tensors=vocabulary_tensors,
    optional=(OFFSETS, KEPT),
    fields=_SPECULATORS_FIELDS,
    classes=("Eagle3Speculator", "Eagle3DraftModel"),
)
