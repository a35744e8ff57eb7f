"""A GGUF file as a base: what a Hugging Face folder would say of it, and the names of its tensors.

llama.cpp's metadata become a config.json, its vocabulary a tokenizer.json (by transformers), in a
folder in the user's cache that is made once for each file. The weights stay where they are: a table
next to the config says where each tensor lies, and the `gguf` package dequantizes the rows that are
read.

Source: the names and changes of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.checkpoints.quantized_formats import QuantizedMatrix, Stored
from clover_jax.checkpoints.tensor_map import Box, LazyTensor
from clover_jax.errors import UserError, reason_of
from clover_jax.runtime.files import atomic_directory, read_json_object, write_json
from clover_jax.runtime.progress import say

TABLE = "model.gguf.json"  # of the folder: the file, and type, shape and place of its tensors
# general.architecture -> architecture and further fields of config.json.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,  # llama.cpp always does
        "intermediate_size": 1,  # of plain MLPs, of which there are none
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
}
# Fields of config.json, by the names of metadata after the architecture's.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Metadata that follow from others.
_REPEATED = ("attention.value_length", "rope.dimension_count", "vocab_size")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
# Gemma 2 of 27B and Gemma 3 of 27B, which alone scale scores by the width over the heads.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

# llama.cpp's names of tensors, and Hugging Face's.
_STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def gguf_folder(path: Path) -> Path:
    """Return a folder in the user's cache that stands for a GGUF file, made if it is missing.

    Raises UserError for a file that is broken, or of an architecture that is not read.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{path} is a GGUF file, which the gguf package reads: pip install gguf")
    stat, home = path.stat(), os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    known = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"
    folder = Path(home) / "clover_jax" / "gguf" / name
    if folder.is_dir():
        return folder

    from gguf import GGUFReader

    say(f"{path}: reading its metadata into {folder}")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # of many kinds, for a file that is cut or no GGUF
        raise UserError(f"{path} is not a whole GGUF file: {reason_of(error)}") from error
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    values = config_values(metadata, tensors, path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(folder) as made:
        write_json(made / "config.json", values)
        # In bytes: the last axis of a quantized tensor has no other unit.
        table = {
            name: (
                tensor.tensor_type.name,
                tensor.data.view(np.uint8).shape,
                int(tensor.data_offset),
            )
            for name, tensor in tensors.items()
        }
        write_json(made / TABLE, {"file": str(path.resolve()), "tensors": table})
        _save_tokenizer(metadata, made, path)
    return folder


def config_values(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Return the fields of config.json that metadata and tensors stand for."""
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{path}: a GGUF file of architecture {kind!r} is not read, only "
            f"{', '.join(ARCHITECTURES)}; use the safetensors release of the model"
        )
    if metadata.get("split.count", 1) > 1:
        raise UserError(f"{path} is one of several parts; join them with gguf-split --merge")
    # Of 32-bit numbers the shortest text is what was written: 1e-06, not 9.99999997e-07.
    of = {
        name.removeprefix(f"{kind}."): float(str(np.float32(x))) if isinstance(x, float) else x
        for name, x in metadata.items()
        if name.startswith(f"{kind}.")
    }
    found = {ours: of[theirs] for theirs, ours in _FIELDS.items() if theirs in of}
    values = ARCHITECTURES[kind] | {"head_dim": of.get("rope.dimension_count")} | found
    for name in ("bos_token_id", "eos_token_id"):
        values[name] = metadata.get(f"tokenizer.ggml.{name}")
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in tensors:
            raise UserError(f"{path} has no tensor {name}; is it a model of its own?")
    values["vocab_size"] = len(tensors["token_embd.weight"].data)
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values["quantization_config"] = {"quant_method": "gguf", "architecture": kind}
    if kind in _LAYERS_OF_27B:
        heads, layers = of["attention.head_count"], of["block_count"]
        is_27b = layers == _LAYERS_OF_27B[kind]
        scalar = of["embedding_length"] // heads if is_27b else of["attention.key_length"]
        values["query_pre_attn_scalar"] = scalar
    values["rope_scaling"] = _scaling(of, tensors, values, path)

    unread = sorted(of.keys() - _FIELDS.keys() - {*_REPEATED, *_SCALING})
    if unread:
        say(f"{path}: metadata of {kind} that are not read: {', '.join(unread)}")
    return values


def _scaling(
    of: Mapping[str, Any], tensors: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, Any] | None:
    """Return how the rotation is scaled: by metadata, or by a factor for each pair of numbers."""
    kind, factor = (of.get(name) for name in _SCALING[:2])
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise UserError(f"{path}: rope.scaling.type {kind!r} is not read, only linear and yarn")
    factors = next((tensors[name] for name in _FACTORS if name in tensors), None)
    original = of.get(_SCALING[2], values["max_position_embeddings"])
    if factors is None:
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
        return None if kind in (None, "none") else scaling
    # Llama 3's rule is stored as its result, the factors of all pairs. Longrope has the same form,
    # and is limited to the length up to which the short ones hold.
    return {
        "rope_type": "longrope",
        "short_factor": np.array(factors.data, float).tolist(),
        "factor": 1.0,
        "attention_factor": float(of.get("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": original,
    }


def _save_tokenizer(metadata: Mapping[str, Any], folder: Path, path: Path) -> None:
    """Write tokenizer.json, with the chat template; nothing where the file has no vocabulary."""
    if "tokenizer.ggml.tokens" not in metadata:
        return
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    fields, settings = (
        {
            ours: metadata[f"tokenizer.{theirs}"]
            for theirs, ours in GGUF_TOKENIZER_MAPPING[part].items()
            if f"tokenizer.{theirs}" in metadata
        }
        for part in ("tokenizer", "tokenizer_config")
    )
    if fields.get("tokenizer_type") == "llama":
        settings.setdefault("add_bos_token", True)  # llama.cpp's own default
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            settings[f"{ours}_token"] = fields["tokens"][index]
    try:
        backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], fields)
    except ValueError as error:
        raise UserError(f"{path}: {reason_of(error)}") from error
    PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(folder)


def hugging_face_names(name: str, architecture: str, count: int) -> list[str]:
    """Return Hugging Face's names of a tensor: one, or one for each of `count` experts.

    There is none for those that are read into the config.

    Example: "blk.3.attn_q.weight" is ["model.layers.3.self_attn.q_proj.weight"].
    """
    if name in _FACTORS:
        return []
    stems = dict(_STEMS)
    if architecture.startswith("gemma"):
        stems["ffn_norm"] = "pre_feedforward_layernorm"
    if architecture == "phi3":
        stems["ffn_up"] = "mlp.gate_up_proj"
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in stems:
        return [name]  # which no config asks for
    stem = stems[match[2]] if match[1] is None else f"model.layers.{match[1]}.{stems[match[2]]}"
    return [f"{stem.format(expert)}.{match[3]}" for expert in range(count if "{}" in stem else 1)]


@dataclasses.dataclass(frozen=True)
class GgufTensors:
    """How the tensors of a GGUF file are read as a Hugging Face folder's.

    architecture: llama.cpp's. heads: of queries and of keys. experts: of a layer.
    types: of each stored tensor, in llama.cpp's words.
    """

    architecture: str
    heads: Mapping[str, int]
    experts: int
    types: Mapping[str, str]

    def join(self, tensors: Mapping[str, Stored]) -> dict[str, Any]:
        """Return tensors by Hugging Face's names; raises UserError for a type that is not read."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        joined: dict[str, Any] = {}
        for name, stored in tensors.items():
            kind = GGMLQuantizationType[self.types[name]]
            size = GGML_QUANT_SIZES[kind]
            try:
                dequantize(np.zeros((1, size[1]), np.uint8), kind)
            except NotImplementedError as error:
                raise UserError(
                    f"{stored.path}: {name} is {kind.name}, which is not read"
                ) from error
            read = functools.partial(dequantize, qtype=kind)
            names = hugging_face_names(name, self.architecture, self.experts)
            for index, ours in enumerate(names):
                joined[ours] = self._matrix(stored, ours, index, size, read)
        return joined

    def _matrix(
        self,
        stored: Stored,
        name: str,
        index: int,
        size: tuple[int, int],
        dequantize: Callable[[np.ndarray], np.ndarray],
    ) -> QuantizedMatrix:
        """Return one tensor; of experts' it is number `index`.

        size: numbers and bytes of a block, which are in one row.
        """
        block, length = size
        *rows, width = stored.shape[1:] if ".experts." in name else stored.shape
        shape = (*rows, width // length * block)
        # Llama's pairs are next to each other there, and half a head apart here.
        letter = re.search(r"self_attn\.([qk])_proj", name)
        order = None
        if letter and self.architecture == "llama":
            pairs = np.arange(rows[0]).reshape(self.heads[letter[1]], -1, 2)
            order = pairs.swapaxes(1, 2).reshape(-1)
        # Gemma's norms are 1 + w there, and w here.
        is_more = self.architecture.startswith("gemma") and name.endswith("norm.weight")
        less = np.float32(is_more)

        def view() -> LazyTensor:
            data = stored.view()[index] if ".experts." in name else stored.view()

            def read(box: Box) -> np.ndarray:
                *before, columns = box
                first, last = columns.start // block, -(-columns.stop // block)
                part = data[tuple(before)] if order is None else data[order[before[0]]]
                wide = dequantize(np.ascontiguousarray(part[..., first * length : last * length]))
                begin = columns.start - first * block
                return wide[..., begin : begin + columns.stop - columns.start] - less

            return LazyTensor(shape, read)

        return QuantizedMatrix(stored.path, shape, view)


def gguf_tensors(values: Mapping[str, Any], architecture: str, folder: Path) -> GgufTensors:
    """Return how the weights of a folder that `gguf_folder` made are read, by its config."""
    table = read_json_object(folder / TABLE)["tensors"]
    heads = {"q": values["num_attention_heads"], "k": values["num_key_value_heads"]}
    types = {name: kind for name, (kind, _, _) in table.items()}
    return GgufTensors(architecture, heads, values.get("num_experts", 0), types)
