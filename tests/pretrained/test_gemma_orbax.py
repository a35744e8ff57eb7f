"""A Gemma in Google's orbax layout is the model that it is in Hugging Face's."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import save_file

from clover_jax.errors import UserError
from clover_jax.pretrained.families import read_checkpoint
from clover_jax.pretrained.loading import load_base
from clover_jax.pretrained.tensor_map import stored_shapes
from tests.tiny_checkpoints import assert_trees_equal, edit_json
from tests.torch_pairs import SHAPE


def config_of(architecture, heads):
    values = SHAPE | {"head_dim": 16, "num_key_value_heads": heads}
    return {"architectures": [architecture], **values, "text_config": values}


def google_arrays(tensors, heads, older):
    """Return what Google's package would hold, by the einsums in which it multiplies them."""
    width, query_heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    found = {
        "embedder/input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm/scale": tensors["model.norm.weight"],
    }
    for index in range(SHAPE["num_hidden_layers"]):
        stored = {
            name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
        }

        def by_head(letter, count, stored=stored):
            return np.einsum(
                "nhd->ndh", stored[f"self_attn.{letter}_proj"].reshape(count, 16, width)
            )

        query, key, value = (
            by_head(letter, n) for letter, n in zip("qkv", (query_heads, heads, heads), strict=True)
        )
        gates = np.stack([stored["mlp.gate_proj"], stored["mlp.up_proj"]])  # [2, F, D]
        layer = {
            "pre_attention_norm/scale": stored["input_layernorm"],
            "post_attention_norm/scale": stored["post_attention_layernorm"],
            "pre_ffw_norm/scale": stored["pre_feedforward_layernorm"],
            "post_ffw_norm/scale": stored["post_feedforward_layernorm"],
            "attn/attn_vec_einsum/w": stored["self_attn.o_proj"].T.reshape(query_heads, 16, width),
            "mlp/gating_einsum": gates.swapaxes(1, 2) if older else gates,
            "mlp/linear": stored["mlp.down_proj"].T,
        }
        if heads == query_heads:
            layer["attn/qkv_einsum/w"] = np.stack([query, key, value])
        else:
            layer |= {"attn/q_einsum/w": query, "attn/kv_einsum/w": np.stack([key, value])}
        if "self_attn.q_norm" in stored:
            layer["attn/_query_norm/scale"] = stored["self_attn.q_norm"]
            layer["attn/_key_norm/scale"] = stored["self_attn.k_norm"]
        found |= {f"layer_{index}/{name}": array for name, array in layer.items()}
    return {name: np.array(array, order="C") for name, array in found.items()}


def published(arrays):
    """Return the flat tree of published folders: one key with slashes, one below it."""
    tree = {"SigLiPFromPatches_0/head": {"w": np.zeros(3, np.float32)}}
    for name, array in arrays.items():
        name = name + "/w" if "/mlp/" in name else name
        group, _, leaf = f"transformer/{name}".rpartition("/")
        tree.setdefault(group, {})[leaf] = array
    return tree


def nested(arrays):
    """Return the tree that the package saves."""
    return unflatten_dict(arrays, sep="/")


@pytest.fixture
def folders(tmp_path):
    """Return a maker of the same random model in both layouts."""

    def make(architecture, tree, heads=2, older=False):
        ours, theirs = tmp_path / "huggingface", tmp_path / "google"
        ours.mkdir()
        (ours / "config.json").write_text(json.dumps(config_of(architecture, heads)))
        random, tensors = np.random.default_rng(0), {}
        for name, shape in stored_shapes(read_checkpoint(ours).leaves).items():
            tensors[name] = random.normal(0, 0.2, shape).astype(np.float32)
        save_file(tensors, ours / "model.safetensors")

        plain = {name.removeprefix("language_model."): x for name, x in tensors.items()}
        if older:  # rows that no token has
            embedding = plain["model.embed_tokens.weight"]
            plain["model.embed_tokens.weight"] = np.concatenate([embedding, embedding[:3]])
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(theirs, tree(google_arrays(plain, heads, older)))
        (theirs / "config.json").write_text((ours / "config.json").read_text())
        return ours, theirs

    return make


@pytest.mark.parametrize(
    "architecture, tree, heads, older",
    [
        ("Gemma2ForCausalLM", published, 2, True),
        ("Gemma3ForCausalLM", nested, 4, False),
        ("Gemma3ForConditionalGeneration", published, 2, False),
    ],
)
def test_both_layouts_are_the_same_params(folders, architecture, tree, heads, older):
    ours, theirs = folders(architecture, tree, heads, older)
    assert_trees_equal(load_base(str(theirs)).params, load_base(str(ours)).params)


def test_what_is_no_such_folder_is_said(folders):
    _, theirs = folders("Gemma3ForCausalLM", nested)
    edit_json(theirs / "config.json", vocab_size=65)
    message = r"embed_tokens.weight has shape \(64, 32\); config.json asks for \(65, 32\)"
    with pytest.raises(UserError, match=message):
        load_base(str(theirs))
    edit_json(theirs / "config.json", vocab_size=64, num_hidden_layers=3)
    with pytest.raises(UserError, match="lacks tensors model.layers.2.input_layernorm.weight"):
        load_base(str(theirs))
    edit_json(theirs / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match="as orbax writes them, which are read of Gemma 2 and 3"):
        load_base(str(theirs))
