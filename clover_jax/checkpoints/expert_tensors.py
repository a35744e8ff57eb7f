"""Families with experts in the place of the MLP: Mixtral, Qwen3-MoE, gpt-oss.

Mixtral has Mistral's attention, Qwen3-MoE Qwen3's. gpt-oss has biases of experts, attention sinks,
and a window in every second layer. Its published experts are MXFP4: 32 numbers of four bits share a
power of two, and two of them one byte, the first in its lower half. All of them are numbers of
bfloat16 too, and are read as such.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from clover_jax.checkpoints.llama_config import (
    check_count,
    parse_llama_config,
    read_full_layers,
    read_window,
)
from clover_jax.checkpoints.llama_tensors import Family, base_leaves
from clover_jax.checkpoints.tensor_files import READABLE, TensorFiles
from clover_jax.checkpoints.tensor_map import Leaf, Piece, transposed, whole
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.models.layers import CLAMP, CLAMPED_GAIN

# The leaves of a layer's experts, in the order in which `expert_leaves` takes their names.
EXPERTS = ("expert_gate", "expert_up", "expert_down")
# Defaults of transformers' configs for absent fields.
MIXTRAL_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_alpha": CLAMPED_GAIN,
    "swiglu_limit": CLAMP,
}
# The published models' rotation, for a config without one.
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
YARN_LENGTH = {"original_max_position_embeddings": 4096}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])  # the highest of four bits is the sign
SCALE_BIAS = 127  # a stored scale e stands for 2^(e - 127)
BLOCKS, SCALES = "_blocks", "_scales"


def parse_mixtral_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Mixtral config into ours: experts in every layer."""
    values = MIXTRAL_DEFAULTS | values | {"attention_bias": False, "mlp_bias": False}
    config = parse_llama_config(values, path)
    window = read_window(values, path)
    # An expert is as wide as the MLP that it replaces.
    size = config.intermediate_size
    return with_experts(config, values, path, "num_local_experts", size, sliding_window=window)


def parse_qwen3_moe_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a Qwen3-MoE config into ours: some layers may have one plain MLP."""
    # Published configs and transformers' name the number of experts differently.
    name = "num_local_experts" if "num_local_experts" in values else "num_experts"
    values = QWEN3_MOE_DEFAULTS | {name: 128} | values | {"mlp_bias": False}
    for count in ("moe_intermediate_size", "decoder_sparse_step"):
        check_count(values, count, path)
    config = parse_llama_config(values, path)

    # Every `step`-th layer has experts, unless it is listed.
    step, plain = values["decoder_sparse_step"], values["mlp_only_layers"] or []
    dense = (i for i in range(config.num_layers) if i in plain or (i + 1) % step)
    return with_experts(
        config,
        values,
        path,
        name,
        values["moe_intermediate_size"],
        query_key_norm=True,
        normed_weights=bool(values.get("norm_topk_prob", False)),
        dense_layers=tuple(dense),
        sliding_window=read_window(values, path) if values.get("use_sliding_window") else None,
    )


def with_experts(
    config: BaseConfig, values: dict[str, Any], path: Path, name: str, size: int, **changes: Any
) -> BaseConfig:
    """Return a config with experts of width `size`, as many as the field `name` says."""
    for count in (name, "num_experts_per_tok"):
        check_count(values, count, path)
    # A router cannot choose an expert twice.
    number, chosen = values[name], values["num_experts_per_tok"]
    if chosen > number:
        raise UserError(f"{path}: num_experts_per_tok ({chosen}) is more than {name} ({number})")
    experts = {"num_experts": number, "experts_per_token": chosen, "expert_size": size}
    return dataclasses.replace(config, **experts, **changes)


def expert_leaves(config: BaseConfig, module: str, names: tuple[str, str, str]) -> list[Leaf]:
    """Return the base's leaves; names: of an expert's gate, up and down, within the module."""
    width, inner, number = config.hidden_size, config.expert_size, config.num_experts
    # [in, out] of an expert's gate, up and down, as in our leaves.
    shapes = ((width, inner), (width, inner), (inner, width))
    sparse = [i for i in range(config.num_layers) if i not in config.dense_layers]

    leaves = leaves_without_mlp(config, sparse)
    for index in sparse:
        path, prefix = (f"layers_{index}", "mlp"), f"model.layers.{index}.{module}"
        leaves.append(transposed((*path, "router"), f"{prefix}.gate.weight", (width, number)))
        for ours, name, shape in zip(EXPERTS, names, shapes, strict=True):
            # Each expert is a stored matrix [out, in] of its own; one leaf holds them all.
            stored = (shape[::-1], shape[::-1], (1, 0))
            pieces = tuple(
                Piece(f"{prefix}.experts.{e}.{name}.weight", *stored, (e,)) for e in range(number)
            )
            leaves.append(Leaf((*path, ours), (number, *shape), pieces))
    return leaves


def leaves_without_mlp(config: BaseConfig, layers: Collection[int]) -> list[Leaf]:
    """Return Llama's leaves, less the plain MLPs of these layers, which give way to experts."""
    mlps = {(f"layers_{index}", "mlp") for index in layers}
    return [leaf for leaf in base_leaves(config) if leaf.path[:2] not in mlps]


def parse_gpt_oss_config(values: dict[str, Any], path: Path) -> BaseConfig:
    """Turn the fields of a gpt-oss config into ours; MXFP4 is the only readable quantization."""
    values = GPT_OSS_DEFAULTS | values | {"mlp_bias": False}
    if values.get("rope_scaling") is None and values.get("rope_parameters") is None:
        values["rope_parameters"] = YARN | YARN_LENGTH
    # To the decoder these weights are plain: `Mxfp4Files` widens them as they are read.
    quantization = values.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        values["quantization_config"] = None
    # The decoder's gate has these two numbers built in.
    if (values["swiglu_alpha"], values["swiglu_limit"]) != (CLAMPED_GAIN, CLAMP):
        raise UserError(
            f"{path}: swiglu_alpha {values['swiglu_alpha']} and swiglu_limit "
            f"{values['swiglu_limit']} are not supported, only {CLAMPED_GAIN} and {CLAMP}"
        )

    config = parse_llama_config(values, path)
    # Without layer_types the layers 1, 3, .. see everything.
    every_second = range(1, config.num_layers, 2)
    return with_experts(
        config,
        values,
        path,
        "num_local_experts",
        config.intermediate_size,
        sinks=True,
        expert_bias=True,
        activation="clamped",
        sliding_window=read_window(values, path),
        full_attention_layers=read_full_layers(values, every_second, path),
    )


def gpt_oss_leaves(config: BaseConfig) -> list[Leaf]:
    """Return Llama's leaves, with experts that are stored together, gate and up alternating."""
    number, width, inner = config.num_experts, config.hidden_size, config.expert_size
    leaves = leaves_without_mlp(config, range(config.num_layers))
    for index in range(config.num_layers):
        path, prefix = (f"layers_{index}", "mlp"), f"model.layers.{index}.mlp"
        # The stored router is [out, in], like Llama's matrices; experts are [X, in, out], as ours.
        leaves += [
            transposed((*path, "router"), f"{prefix}.router.weight", (width, number)),
            whole((*path, "router_bias"), f"{prefix}.router.bias", (number,)),
            whole((*path, "expert_down"), f"{prefix}.experts.down_proj", (number, inner, width)),
            whole((*path, "expert_down_bias"), f"{prefix}.experts.down_proj_bias", (number, width)),
        ]

        # One matrix has both, and so has its bias.
        for kind, shape in (("", (number, width, inner)), ("_bias", (number, inner))):
            both = f"{prefix}.experts.gate_up_proj{kind}"
            leaves.append(_every_second((*path, f"expert_gate{kind}"), both, shape, 0))
            leaves.append(_every_second((*path, f"expert_up{kind}"), both, shape, 1))
    return leaves


def _every_second(path: tuple[str, ...], name: str, shape: tuple[int, ...], first: int) -> Leaf:
    """Return the leaf that is every second column of a stored tensor, from `first` on."""
    stored, part = (*shape[:-1], 2 * shape[-1]), (..., slice(first, None, 2))
    return Leaf(path, shape, (Piece(name, stored, shape, tuple(range(len(shape))), part=part),))


class Mxfp4Files(TensorFiles):
    """Weight files in which blocks and scales of MXFP4 are one tensor, [X, inputs, outputs]."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._packed: set[str] = set()
        names = [name.removesuffix(BLOCKS) for name in self.shapes if name.endswith(BLOCKS)]
        for name in names:
            # Whatever is misshapen stays under its own names, which no config asks for.
            blocks, scales = self.shapes[name + BLOCKS], self.shapes.get(name + SCALES)
            if len(blocks) != 4 or blocks[3] != 16 or scales != blocks[:3]:
                continue
            # A block holds 32 inputs: 16 bytes of two numbers each.
            del self.shapes[name + BLOCKS], self.shapes[name + SCALES]
            self.shapes[name] = (blocks[0], 32 * blocks[2], blocks[1])
            self._places[name] = self._places[name + BLOCKS]
            self._packed.add(name)

    def _rename(self, rename: Callable[[str], str]) -> str | None:
        # Called by the constructor too, before anything is packed.
        self._packed = set(map(rename, getattr(self, "_packed", ())))
        return super()._rename(rename)

    def read(
        self, name: str, rows: slice = slice(None), types: Collection[str] = READABLE
    ) -> np.ndarray:
        """Return one tensor, or a slice along its first axis; MXFP4 as bfloat16."""
        if name not in self._packed:
            return super().read(name, rows, types)
        # U8 is not among the types of weights that `read` accepts by default.
        blocks = super().read(name + BLOCKS, rows, ("U8",))
        return widen_mxfp4(blocks, super().read(name + SCALES, rows, ("U8",)))

    def view(self, name: str) -> np.ndarray:
        """Return one tensor as a view on its file; MXFP4 is read and widened whole."""
        return self.read(name) if name in self._packed else super().view(name)


def widen_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Widen [X, O, I / 32, 16] bytes and [X, O, I / 32] exponents to numbers, [X, I, O].

    Source: the OCP Microscaling formats, version 1.0; transformers' reader of gpt-oss.
    """
    number, outputs, groups, _ = blocks.shape
    wide = np.empty((number, 32 * groups, outputs), ml_dtypes.bfloat16)
    # One expert at a time: in float32 all of them would take twice the result.
    for expert in range(number):
        halves = np.stack([blocks[expert] & 0x0F, blocks[expert] >> 4], axis=-1)
        numbers = FP4[halves].reshape(outputs, groups, 32)
        # int32, since uint8 scales below the bias would wrap around.
        exponents = scales[expert, :, :, None].astype(np.int32) - SCALE_BIAS
        wide[expert] = np.ldexp(numbers, exponents).reshape(outputs, -1).T
    return wide


# In Mixtral's names w1 is gate, w3 is up and w2 is down.
MIXTRAL = Family(
    parse_mixtral_config,
    functools.partial(expert_leaves, module="block_sparse_moe", names=("w1", "w3", "w2")),
)
QWEN3_MOE = Family(
    parse_qwen3_moe_config,
    functools.partial(expert_leaves, module="mlp", names=("gate_proj", "up_proj", "down_proj")),
)
GPT_OSS = Family(parse_gpt_oss_config, gpt_oss_leaves, files=Mxfp4Files)
