"""Gemma's parameters as Google publishes them for JAX: an orbax folder.

The layout is that of the package `gemma` (`gm.ckpts`, `gm.nn`). A published folder is flat, with
"transformer/layer_0/attn/q_einsum" as one key and "w" below it; one that the package saved is
nested, without "transformer". Matrices are [heads, in, out] where Hugging Face has [out, in]; norms
are stored as w for 1 + w and embeddings unscaled, as they are there. Of the model itself the folder
has nothing but shapes, so it needs a Hugging Face config.json and tokenizer beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection
from pathlib import Path

import jax
import numpy as np

from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from clover_jax.pretrained.family import Family
from clover_jax.pretrained.gemma import adjust_gemma
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.tensor_files import READABLE, TensorFiles, check_finite
from clover_jax.pretrained.tensor_map import Leaf

Take = Callable[[np.ndarray], np.ndarray]
MARK = "_METADATA"  # a file of every orbax folder
_TEXT = re.compile(r"embedder/input_embedding|(final_norm|layer_\d+)/.*")  # others are for images


def _same(stored: np.ndarray) -> np.ndarray:
    return stored


def _rows(stored: np.ndarray) -> np.ndarray:
    """Return [heads, D, H] as [heads H, D]."""
    return stored.swapaxes(1, 2).reshape(-1, stored.shape[1])


def _columns(stored: np.ndarray) -> np.ndarray:
    """Return [.., D] as [D, ..]."""
    return stored.reshape(-1, stored.shape[-1]).T


def _heads(part: int) -> Take:
    return lambda stored: _rows(stored[part])


def _half(part: int) -> Take:
    return lambda stored: stored[part]


# Stored array of a layer -> the names of Hugging Face's tensors in it, and how each is taken.
_OF_LAYER: dict[str, dict[str, Take]] = {
    "pre_attention_norm/scale": {"input_layernorm": _same},
    "post_attention_norm/scale": {"post_attention_layernorm": _same},
    "pre_ffw_norm/scale": {"pre_feedforward_layernorm": _same},
    "post_ffw_norm/scale": {"post_feedforward_layernorm": _same},
    "attn/_query_norm/scale": {"self_attn.q_norm": _same},
    "attn/_key_norm/scale": {"self_attn.k_norm": _same},
    "attn/q_einsum": {"self_attn.q_proj": _rows},
    "attn/kv_einsum": {"self_attn.k_proj": _heads(0), "self_attn.v_proj": _heads(1)},
    # As many key heads as query heads.
    "attn/qkv_einsum": {f"self_attn.{name}_proj": _heads(i) for i, name in enumerate("qkv")},
    "attn/attn_vec_einsum": {"self_attn.o_proj": _columns},
    "mlp/gating_einsum": {"mlp.gate_proj": _half(0), "mlp.up_proj": _half(1)},
    "mlp/linear": {"mlp.down_proj": _columns},
}


class GemmaOrbaxFiles(TensorFiles):
    """The text's tensors of an orbax folder, under the names and in the order of Hugging Face.

    An array is read whole, by every process; the last one stays, since several tensors share one.
    """

    def __init__(self, directory: Path):
        # Imported here: orbax is slow to import, and most folders need none of it.
        from clover_jax.pretrained.orbax_leaves import read_leaf, stored_leaves

        # Without the __init__ of TensorFiles, which looks for safetensors files.
        leaves = stored_leaves(directory)
        named = {_name_of(path): path for path in leaves}
        width = _width(directory, {name: leaves[path].shape for name, path in named.items()})
        self.directory = directory
        self.shapes = {}
        # Hugging Face's name -> the path of the array with the tensor, and how to take it out.
        self._taken: dict[str, tuple[tuple[str, ...], Take]] = {}
        for name, path in named.items():
            if not _TEXT.fullmatch(name):
                continue
            leaf = jax.ShapeDtypeStruct(leaves[path].shape, leaves[path].dtype)
            # A quantised folder holds integers, which would be cast as if they were weights.
            if leaf.dtype not in READABLE.values():
                raise UserError(
                    f"{directory}: {name} is stored as {leaf.dtype}; the readable types are "
                    f"{', '.join(READABLE)}, so give an unquantised checkpoint"
                )

            # Older models have the gates' two matrices the other way round.
            turned = name.endswith("gating_einsum") and leaf.shape[-1] != width
            for ours, take in _tensors_in(name).items():
                way = functools.partial(_turned, take) if turned else take
                self._taken[ours] = (path, way)
                # Traced, so that no array is read for its shape.
                self.shapes[ours] = jax.eval_shape(way, leaf).shape
        self._places = dict.fromkeys(self.shapes, directory)
        self._read = functools.lru_cache(maxsize=1)(functools.partial(read_leaf, directory))

    def read(
        self, name: str, rows: slice = slice(None), types: Collection[str] = READABLE
    ) -> np.ndarray:
        """Return one tensor, or a slice along its first axis; raises as the class above."""
        array = self.view(name)[rows]
        check_finite(array, name, self.directory)
        return array

    def view(self, name: str) -> np.ndarray:
        """Return one tensor; its values are not looked at, which is for `check_part`."""
        path, take = self._taken[name]
        return take(self._read(path))


def _name_of(path: tuple[str, ...]) -> str:
    """Return what flat and nested folders have alike, such as "layer_0/attn/q_einsum"."""
    return "/".join(path).removeprefix("transformer/").removesuffix("/w")


def _width(directory: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    if "final_norm/scale" not in shapes:
        raise UserError(
            f"{directory} is an orbax folder without final_norm/scale, so no Gemma of Google's "
            "layout; give a Hugging Face folder"
        )
    return shapes["final_norm/scale"][0]


def _tensors_in(name: str) -> dict[str, Take]:
    """Return Hugging Face's names for what an array holds; an unknown one keeps its own."""
    if name == "embedder/input_embedding":
        return {"model.embed_tokens.weight": _same}
    if name == "final_norm/scale":
        return {"model.norm.weight": _same}
    layer, _, part = name.partition("/")
    # An unknown array keeps its name, so that `TensorFiles.check` refuses it.
    if part not in _OF_LAYER:
        return {name: _same}
    prefix = f"model.layers.{layer.removeprefix('layer_')}"
    return {f"{prefix}.{ours}.weight": take for ours, take in _OF_LAYER[part].items()}


def _turned(take: Take, stored: np.ndarray) -> np.ndarray:
    return take(stored).T


def is_orbax(directory: Path) -> bool:
    """Say whether a folder's weights are those that orbax wrote."""
    return (directory / MARK).is_file() and not any(directory.glob("*.safetensors"))


def in_orbax(family: Family, directory: Path) -> Family:
    """Return the family for an orbax folder; raises UserError where its layout is not known."""
    # `adjust_gemma` marks the families that are Gemma's.
    if family.adjust is not adjust_gemma:
        raise UserError(
            f"{directory} holds weights as orbax writes them, which are read of Gemma 2 and 3 "
            "only; give a Hugging Face folder"
        )
    # The images' part has names of its own there, the text none for being beside it.
    leaves = functools.partial(_leaves, directory)
    return dataclasses.replace(family, leaves=leaves, ignored="", files=GemmaOrbaxFiles)


def _leaves(directory: Path, config: BaseConfig) -> list[Leaf]:
    """Return the text's leaves; of an embedding with more rows than tokens its first ones."""
    embedding, *others = base_leaves(config)
    (piece,) = embedding.pieces
    rows, width = piece.shape
    # At least the config's rows are asked for, so that the check refuses too few.
    stored, _ = GemmaOrbaxFiles(directory).shapes.get(piece.name, piece.shape)
    cut = dataclasses.replace(piece, shape=(max(stored, rows), width), part=(slice(rows),))
    return [dataclasses.replace(embedding, pieces=(cut,)), *others]
