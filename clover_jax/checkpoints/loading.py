"""Load a base model: find its folder, read its config by its family, place its tensors one by one.

Conversions need little of a base's weights, so they open it without reading them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer

from clover_jax.array_types import FLOAT32, Array, Place
from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.config_json import read_config, tell_unknown
from clover_jax.checkpoints.expert_tensors import GPT_OSS, MIXTRAL, QWEN3_MOE, QWEN3_VL_MOE
from clover_jax.checkpoints.gemma4 import GEMMA4, GEMMA4_UNIFIED, GEMMA4_UNIFIED_WHOLE, GEMMA4_WHOLE
from clover_jax.checkpoints.gguf_file import GgufTensors
from clover_jax.checkpoints.glm import GLM4, GLM4_MOE
from clover_jax.checkpoints.llama_config import eos_ids, parse_llama_config
from clover_jax.checkpoints.llama_kin import (
    BAICHUAN,
    GEMMA2,
    GEMMA3,
    GEMMA3_MULTIMODAL,
    GRANITE,
    MISTRAL,
    MISTRAL3,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN3,
    QWEN3_VL,
    parse_qwen2_config,
    parse_smollm3_config,
)
from clover_jax.checkpoints.llama_tensors import Family
from clover_jax.checkpoints.quantized_config import Quantization, read_quantization
from clover_jax.checkpoints.qwen_hybrids import (
    QWEN3_5,
    QWEN3_5_IMAGES,
    QWEN3_5_MOE,
    QWEN3_5_MOE_IMAGES,
    QWEN3_NEXT,
)
from clover_jax.checkpoints.shapes import base_shapes, is_shape, random_base, shape_config
from clover_jax.checkpoints.sources import find_directory, found_below
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.checkpoints.tensor_map import Leaf, StoredLeaf, stored_shapes
from clover_jax.config import BaseConfig
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from clover_jax.runtime.distributed import is_primary
from clover_jax.runtime.progress import progress_bar, say

_COMPARED_ROWS = 4096
_SHOWN_FROM = 10**9  # bytes of a base from which on loading shows its progress


def load_base(source: str, dtype: jnp.dtype = FLOAT32, place: Place | None = None) -> BaseModel:
    """Load the frozen base.

    source: a Hugging Face folder, a GGUF file, a hub id (`owner/name@revision`), "builtin:tiny",
        or "shape:NAME" for random weights (see checkpoints/shapes.py).
    dtype: of the params.
    place: puts each leaf on its device or shards, `place(path, leaf) -> jax.Array`, where
        `leaf[box]` reads a part of it and `leaf[...]` all; by default all of it is cast to `dtype`
        on the default device.
    Raises UserError for anything missing, broken or unsupported, naming it.
    """
    if is_shape(source):
        return random_base(source, dtype, place)
    directory = find_directory(source)
    checkpoint = read_checkpoint(directory)
    place = place or place_as(dtype)
    # Both checks come before any tensor is read, which may take minutes.
    _check_tokenizer(directory, checkpoint.config.vocab_size)
    checkpoint, files = _open_files(directory, checkpoint)

    def stored(leaf: Leaf) -> StoredLeaf:
        names = [piece.name for piece in leaf.pieces]
        tensors = {name: checkpoint.adjust(name, files.view(name)) for name in names}
        return StoredLeaf(leaf, tensors, files.check_part, dtype)

    # A large base shows how many GB are placed, counted over all processes.
    leaves, size, params, done = checkpoint.leaves, jnp.dtype(dtype).itemsize, {}, 0
    whole = sum(math.prod(leaf.shape) for leaf in leaves) * size
    is_shown = whole >= _SHOWN_FROM and is_primary()
    shown = progress_bar(len(leaves), "load", "tensor") if is_shown else contextlib.nullcontext()
    with shown as bar:
        # Leaf by leaf, each released before the next: a base may fill most of the memory of host
        # and device.
        for leaf in leaves:
            params[leaf.path] = place(leaf.path, stored(leaf))
            done += math.prod(leaf.shape) * size
            if bar is not None:
                bar.show(f"{done / 1e9:.1f} of {whole / 1e9:.1f} GB")
                bar.update()
    return BaseModel(checkpoint.config, unflatten_dict(params), directory, source)


class StoredMatrix:
    """A [V, D] matrix of a checkpoint: `matrix[0:4096]` reads 4096 rows and no more."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[slice], np.ndarray]):
        self.shape = shape
        self._read = read

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return the rows of a slice without a step."""
        # safetensors refuses a slice that ends beyond its tensor.
        start, stop, _ = rows.indices(self.shape[0])
        return self._read(slice(start, stop))


def open_base(source: str) -> BaseModel:
    """Return a base whose params are shapes; embedding and output matrix are a `StoredMatrix` each.

    That is enough for a fingerprint and for copies in third-party layouts. Raises as `load_base`,
    except that the tokenizer is read only when the fingerprint is taken.
    """
    if is_shape(source):
        return random_base(source, FLOAT32, None)
    directory = find_directory(source)
    checkpoint = read_checkpoint(directory)
    checkpoint, files = _open_files(directory, checkpoint)

    params = base_shapes(checkpoint.config)
    for leaf in checkpoint.leaves:
        if leaf.path in (("embedding",), ("lm_head",)):
            # A family's adjustment of a matrix works row by row.
            def read(rows: slice, name: str = leaf.pieces[0].name) -> np.ndarray:
                return checkpoint.adjust(name, files.read(name, rows))

            params[leaf.path[0]] = StoredMatrix(leaf.shape, read)
    return BaseModel(checkpoint.config, params, directory, source)


def _open_files(directory: Path, checkpoint: Checkpoint) -> tuple[Checkpoint, TensorFiles]:
    """Return the checked files of a checkpoint, which the files may correct."""
    files = TensorFiles(directory, checkpoint.quantization)
    if alternative := checkpoint.family.alternative:
        # Of two ways to store experts, the one that more of the stored tensors fit.
        def num_fitting(leaves: list[Leaf]) -> int:
            return sum(files.shapes.get(n) == s for n, s in stored_shapes(leaves).items())

        leaves = alternative(checkpoint.config)
        if num_fitting(leaves) > num_fitting(checkpoint.leaves):
            family = dataclasses.replace(checkpoint.family, leaves=alternative)
            checkpoint = checkpoint._replace(family=family, leaves=leaves)
    # Tensors that are not read. Old exports carry the rotary frequencies, which follow from the
    # config; some store the output matrix a second time although it is tied to the embedding.
    layers = str(checkpoint.config.num_layers)
    ignored = checkpoint.family.ignored.replace("<layers>", layers)
    harmless = [r".*\.rotary_emb\.inv_freq", ignored]
    harmless += [r"(.*\.)?lm_head\.weight"] * checkpoint.config.tie_word_embeddings
    wanted = stored_shapes(checkpoint.leaves)
    files.check(
        wanted, harmless=lambda name: any(re.fullmatch(pattern, name) for pattern in harmless)
    )
    of_others = re.compile(ignored)
    left = [name for name in files.shapes if name not in wanted and of_others.fullmatch(name)]
    if left:
        say(f"{directory}: {len(left)} tensors not read, which text does not need: {left[0]} ...")
    return _as_stored(directory, checkpoint, files), files


def _as_stored(directory: Path, checkpoint: Checkpoint, files: TensorFiles) -> Checkpoint:
    """Return a checkpoint with the output matrix that is stored, even where its config ties it."""
    if not checkpoint.config.tie_word_embeddings:
        return checkpoint
    config = dataclasses.replace(checkpoint.config, tie_word_embeddings=False)
    leaves = checkpoint.family.leaves(config)
    names = {leaf.path: leaf.pieces[0].name for leaf in leaves}
    matrix, embedding = names["lm_head",], names["embedding",]
    if matrix not in files.shapes:
        return checkpoint
    # Some rows at a time, as bits: both may be large.
    stored, tied = files.view(matrix), files.view(embedding)
    starts = range(0, len(tied), _COMPARED_ROWS)
    parts = (slice(start, start + _COMPARED_ROWS) for start in starts)
    if stored.shape == tied.shape and all(np.array_equal(stored[p], tied[p]) for p in parts):
        return checkpoint
    say(
        f"{directory}: {matrix} differs from the embedding, to which config.json ties it; it is "
        "read, as transformers does"
    )
    return checkpoint._replace(config=config, leaves=leaves)


def describe_base(source: str) -> BaseModel:
    """Return a base that has no params yet; raises as `load_base` does."""
    if is_shape(source):
        return BaseModel(shape_config(source), {}, Path(source), source)
    directory = find_directory(source)
    return BaseModel(read_checkpoint(directory).config, {}, directory, source)


def place_as(dtype: jnp.dtype) -> Place:
    """Return the plain placement: cast to `dtype`, on the default device."""

    def place(path: tuple[str, ...], leaf: Any) -> Array:
        return jnp.array(leaf[...], dtype)  # a copy: an alias of host memory could not be donated

    return place


def _check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raise UserError for a token without an embedding, which would fail only in some texts.

    Added tokens do not count: Gemma 3's of 1B has one for images, for which that base has no row.
    A prompt that names such a token is refused when it is read.
    """
    vocabulary: dict[str, int] = {}
    path = directory / "tokenizer.json"
    if path.is_file():
        # Faster than load_tokenizer, which imports transformers.
        try:
            vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a readable tokenizer: {error}") from error
    elif (tokenizer := load_tokenizer(directory)) is not None:
        added = tokenizer.get_added_vocab()
        pairs = tokenizer.get_vocab().items()
        vocabulary = {token: id_ for token, id_ in pairs if token not in added}

    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise UserError(
            f"{directory}: token {token!r} of its tokenizer has id {largest}, but the "
            f"embedding has only {vocab_size} rows; the tokenizer belongs to another model"
        )


# Each with its model_type, for a config.json that names no architecture. Vicuna and the Llama
# versions 1 to 3.3 are all LlamaForCausalLM; the first Baichuan 7B is spelled with a capital C.
_FAMILIES = (
    ("LlamaForCausalLM", "llama", Family(parse_llama_config)),
    ("MistralForCausalLM", "mistral", MISTRAL),
    ("Qwen2ForCausalLM", "qwen2", Family(parse_qwen2_config)),
    ("Qwen3ForCausalLM", "qwen3", QWEN3),
    ("BaiChuanForCausalLM", None, BAICHUAN),
    ("BaichuanForCausalLM", None, BAICHUAN),
    ("MixtralForCausalLM", "mixtral", MIXTRAL),
    ("Qwen3MoeForCausalLM", "qwen3_moe", QWEN3_MOE),
    ("GptOssForCausalLM", "gpt_oss", GPT_OSS),
    ("Phi3ForCausalLM", "phi3", PHI3),
    ("SmolLM3ForCausalLM", "smollm3", Family(parse_smollm3_config)),
    ("GraniteForCausalLM", "granite", GRANITE),
    ("Olmo2ForCausalLM", "olmo2", OLMO2),
    ("Olmo3ForCausalLM", "olmo3", OLMO3),
    ("Glm4ForCausalLM", "glm4", GLM4),
    ("Glm4MoeForCausalLM", "glm4_moe", GLM4_MOE),
    # The text part is read.
    ("Mistral3ForConditionalGeneration", "mistral3", MISTRAL3),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", QWEN3_VL),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", QWEN3_VL_MOE),
    ("Qwen3NextForCausalLM", "qwen3_next", QWEN3_NEXT),
    ("Qwen3_5ForCausalLM", "qwen3_5_text", QWEN3_5),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", QWEN3_5_IMAGES),
    ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN3_5_MOE),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", QWEN3_5_MOE_IMAGES),
    ("Gemma2ForCausalLM", "gemma2", GEMMA2),
    ("Gemma3ForCausalLM", "gemma3_text", GEMMA3),
    # 4B and larger: the text part is read.
    ("Gemma3ForConditionalGeneration", "gemma3", GEMMA3_MULTIMODAL),
    ("Gemma4ForCausalLM", "gemma4_text", GEMMA4),
    ("Gemma4ForConditionalGeneration", "gemma4", GEMMA4_WHOLE),
    ("Gemma4UnifiedForCausalLM", "gemma4_unified_text", GEMMA4_UNIFIED),
    ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", GEMMA4_UNIFIED_WHOLE),
)
ARCHITECTURES = {name: family for name, _, family in _FAMILIES}
MODEL_TYPES = {kind: name for name, kind, _ in _FAMILIES if kind}
_TYPES_OF = {name: {kind for each, kind, _ in _FAMILIES if each == name} for name in ARCHITECTURES}


class Checkpoint(NamedTuple):
    """The config of a folder, the place of its tensors, and an adjustment by (name, tensor).

    quantization: how its matrices are stored; None where they are plain.
    """

    family: Family
    config: BaseConfig
    leaves: list[Leaf]
    adjust: Callable[[str, np.ndarray], np.ndarray]
    quantization: Quantization | GgufTensors | None


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and generation_config.json; raises UserError for what cannot be decoded."""
    path = directory / "config.json"
    if not path.is_file():
        below = found_below(directory, ("config.json",))
        raise UserError(
            f"{directory} has no config.json{below or '; it is not a Hugging Face model folder'}"
        )

    values = read_config(path)
    # An architecture that is not read is refused before what else its config has.
    name, kind = architecture_of(values, path), values.get("model_type")
    # To the decoder all weights are plain: `TensorFiles` dequantizes them.
    quantization = read_quantization(values, path)
    family = ARCHITECTURES[name]
    if kind is not None and not {kind, None} & _TYPES_OF[name]:
        say(f"{path}: model_type {kind!r} is not that of {name}, as which it is read")
    config = family.parse(values, path)
    for fields in (values, values.get("text_config") or {}):
        tell_unknown(fields, path, fields.get("model_type"))
    # Not every folder has one: it is newer than the format. It wins: Llama 3's config.json names
    # one id, and this the end of a turn too.
    newer = directory / "generation_config.json"
    ids = eos_ids(read_config(newer), newer) if newer.is_file() else None
    if ids is not None:
        lost = sorted(set(config.eos_token_ids) - set(ids))
        if lost:
            say(f"{path}: eos_token_id {lost} does not end texts, as {newer.name} names {ids} only")
        config = dataclasses.replace(config, eos_token_ids=ids)
    config = _known_ends(config, path)
    # `adjust` gets the stored fields: our config does not say which version of Baichuan it is.
    adjust = functools.partial(family.adjust, values)
    return Checkpoint(family, config, family.leaves(config), adjust, quantization)


def _known_ends(config: BaseConfig, path: Path) -> BaseConfig:
    """Return a config without ids that end no text, since no token has them, and name these."""
    known = tuple(id_ for id_ in config.eos_token_ids if 0 <= id_ < config.vocab_size)
    if known != config.eos_token_ids:
        unknown = [id_ for id_ in config.eos_token_ids if id_ not in known]
        say(
            f"{path}: eos_token_id {', '.join(f'{id_!s:.20}' for id_ in unknown)} is not in "
            f"the vocabulary, 0 to {config.vocab_size - 1}, and ends no text"
        )
    return dataclasses.replace(config, eos_token_ids=known)


def architecture_of(values: dict[str, Any], path: Path) -> str:
    """Return the supported architecture that a config names; raises UserError for any other."""
    # transformers writes a list, and some exports leave it out.
    names = values.get("architectures") or []
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
