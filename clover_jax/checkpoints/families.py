"""The base models that can be read, by the architecture that their config.json names."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clover_jax.checkpoints.expert_tensors import GPT_OSS, MIXTRAL, QWEN3_MOE
from clover_jax.checkpoints.gemma import GEMMA2, GEMMA3, GEMMA3_MULTIMODAL
from clover_jax.checkpoints.llama_config import eos_ids, parse_llama_config
from clover_jax.checkpoints.llama_kin import (
    BAICHUAN,
    PHI3,
    parse_mistral_config,
    parse_qwen2_config,
    parse_qwen3_config,
)
from clover_jax.checkpoints.llama_tensors import Family
from clover_jax.checkpoints.tensor_map import Leaf
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.runtime.json_files import read_json_object

# Vicuna and the Llama versions 1 to 3.2 are all LlamaForCausalLM.
ARCHITECTURES = {
    "LlamaForCausalLM": Family(parse_llama_config),
    "MistralForCausalLM": Family(parse_mistral_config),
    "Qwen2ForCausalLM": Family(parse_qwen2_config),
    "Qwen3ForCausalLM": Family(parse_qwen3_config),
    "BaiChuanForCausalLM": BAICHUAN,  # the first 7B is spelt this way
    "BaichuanForCausalLM": BAICHUAN,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "Phi3ForCausalLM": PHI3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_MULTIMODAL,  # 4B and larger: the text part is read
}
# For a config.json that names no architecture.
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}


class Checkpoint(NamedTuple):
    """The config of a folder and how its weights are read.

    family: opens its files and names the tensors that are ignored.
    leaves: where the tensors lie in the params.
    adjust: changes a tensor, from its name and itself, before it is used.
    """

    family: Family
    config: BaseConfig
    leaves: list[Leaf]
    adjust: Callable[[str, np.ndarray], np.ndarray]

    def is_harmless(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor, which is not read.

        Old exports carry the rotary frequencies, which follow from the config. Some store the
        output matrix a second time although it is tied to the embedding.
        """
        tied_copy = self.config.tie_word_embeddings and name == "lm_head.weight"
        ignored = (r".*\.rotary_emb\.inv_freq", self.family.ignored)
        return tied_copy or any(re.fullmatch(pattern, name) for pattern in ignored)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and, for the end-of-sequence ids, generation_config.json.

    Raises UserError when a file is broken or asks for anything that the decoder cannot do.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} has no config.json; it is not a Hugging Face model folder")

    values = read_json_object(path)
    family = ARCHITECTURES[architecture_of(values, path)]
    config = family.parse(values, path)
    # Not every folder has one: it is newer than the format. It wins: Llama 3's config.json names
    # one id, and this the end of a turn too.
    newer = directory / "generation_config.json"
    ids = eos_ids(read_json_object(newer), newer) if newer.is_file() else None
    if ids is not None:
        config = dataclasses.replace(config, eos_token_ids=ids)
    # `adjust` gets the stored fields: our config does not say which version of Baichuan it is.
    adjust = functools.partial(family.adjust, values)
    return Checkpoint(family, config, family.leaves(config), adjust)


def read_base_config(directory: Path) -> BaseConfig:
    """Return the config of a folder; raises as `read_checkpoint`."""
    return read_checkpoint(directory).config


def architecture_of(values: dict[str, Any], path: Path) -> str:
    """Return the supported architecture that a config names.

    Raises UserError, with what is supported, for any other.
    """
    # transformers writes a list, and some exports leave it out.
    names = values.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(f"{path}: architectures must be a list of names, not {names!r}")
    if not names and values.get("model_type") in MODEL_TYPES:
        return MODEL_TYPES[values["model_type"]]
    # A config may name several classes; one that is known is enough.
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name

    named = ", ".join(map(str, names)) or values.get("model_type") or "none named"
    raise UserError(
        f"{path}: architecture {named} is not supported; "
        f"the supported ones are {', '.join(ARCHITECTURES)}"
    )
