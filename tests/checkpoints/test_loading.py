"""Bases load with the reference's numbers; whatever is wrong with a checkpoint is named."""

import json
import os
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.tensor_files import is_finite
from clover_jax.data.chat import encode_prompt
from clover_jax.data.prompts import Prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, causal_mask, project
from experiments.tiny_base.base_folder import export_base
from tests.tiny_checkpoints import assert_trees_equal, edit_json, edit_tensors
from tests.tiny_tokenizers import save_byte_level

QUERY = "model.layers.1.self_attn.q_proj.weight"


def split_in_shards(folder, num_shards=3):
    """Replace the single file by shards and an index; return the shards' names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    place = {name: shards[i % num_shards] for i, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: x for name, x in tensors.items() if place[name] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return shards


def test_hidden_states_and_logits_equal_the_reference(reference_dir):
    base = load_base(str(reference_dir))
    expected = np.load(reference_dir.parent / "expected.npz")
    ids = jnp.asarray(expected["input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    output = Decoder(base.config).apply(
        {"params": base.params}, ids, positions, causal_mask(*ids.shape)
    )
    logits = project(base.lm_head, output.hidden["post_norm"])
    close = {"atol": 1e-4, "rtol": 0}
    np.testing.assert_allclose(output.hidden["pre_norm"], expected["base_prenorm"], **close)
    np.testing.assert_allclose(output.hidden["post_norm"], expected["base_postnorm"], **close)
    np.testing.assert_allclose(logits, expected["base_logits"], **close)


def test_the_params_are_the_decoders_and_export_is_the_reverse_of_loading(reference_dir):
    base = load_base(str(reference_dir))
    ids = jnp.zeros((1, 2), jnp.int32)
    init = jax.eval_shape(Decoder(base.config).init, jax.random.key(0), ids, ids, causal_mask(1, 2))
    shapes = jax.tree.map(lambda leaf: leaf.shape, init["params"])
    assert jax.tree.map(lambda leaf: leaf.shape, base.params) == shapes
    exported = export_base(base.params, base.config)
    stored = load_file(reference_dir / "model.safetensors")
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)


def test_shards_and_harmless_tensors_change_no_params(reference_dir, folder):
    whole = load_base(str(reference_dir)).params
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    assert_trees_equal(load_base(str(folder)).params, whole)
    split_in_shards(folder)
    assert_trees_equal(load_base(str(folder)).params, whole)


def test_bfloat16_files_and_params(folder):
    def to_bfloat16(tensors):
        tensors.update({name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})

    exact = load_base(str(folder), jnp.bfloat16).params
    edit_tensors(folder, to_bfloat16)
    assert_trees_equal(load_base(str(folder), jnp.bfloat16).params, exact)
    wide = load_base(str(folder)).params
    assert_trees_equal(wide, jax.tree.map(lambda x: x.astype(jnp.float32), exact))


def test_place_receives_every_tensor_once_and_one_at_a_time(reference_dir):
    seen, previous = [], None

    def place(path, leaf):
        nonlocal previous
        assert previous is None or previous() is None, f"{seen[-1]} is still held"
        seen.append(path)
        previous = weakref.ref(leaf)
        return jnp.asarray(leaf[...])

    base = load_base(str(reference_dir), place=place)
    paths = jax.tree_util.tree_leaves_with_path(base.params)
    assert sorted(seen) == sorted(tuple(key.key for key in path) for path, _ in paths)


def test_tied_embeddings_need_no_output_matrix_and_ignore_a_copy(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    copy = "lm_head.weight", "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({copy[0]: tensors[copy[1]].copy()}))
    with_copy = load_base(str(folder))
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    base = load_base(str(folder))
    assert "lm_head" not in base.params
    assert base.lm_head is base.params["embedding"]
    assert_trees_equal(base.params, with_copy.params)


def set_tensor(name, value):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: value}))


def without_map(folder):
    split_in_shards(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def without_weights(folder, *others):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    for name in others:
        (folder / name).touch()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


BIAS = "model.layers.0.self_attn.q_proj.bias"
SPOILED = {
    "no config": (lambda folder: (folder / "config.json").unlink(),
     "base has no config.json; it is not a Hugging Face model folder"),
    "no file of the index": (lambda folder: (folder / "model.safetensors").unlink(),
     "lacks shard model.safetensors, which .* lists"),
    "no weights": (without_weights, r"has no weights: neither model\.safetensors nor"),
    "a broken PyTorch file": (lambda folder: without_weights(folder, "pytorch_model.bin"),
     r"pytorch_model\.bin .*save the weights as model\.safete"),
    "an orbax folder": (lambda folder: without_weights(folder, "_METADATA"),
     "is an orbax folder, .* use the safetensors release"),
    "a missing shard": (lambda folder: (folder / split_in_shards(folder)[1]).unlink(),
     "lacks shard model-00002-of-00003.safetensors, which .*index.json lists"),
    "no map": (without_map, "has no weight_map"),
    "a torn file": (lambda folder: os.truncate(folder / "model.safetensors", 5000),
     r"model\.safetensors is not a whole safetensors file"),
    "a missing tensor": (lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(QUERY)),
     f"lacks tensor {QUERY}, which its config.json asks for"),
    "an extra tensor": (set_tensor(BIAS, np.zeros(32, np.float32)), f"has tensor {BIAS}"),
    "surplus layers": (lambda folder: edit_json(folder / "config.json", num_hidden_layers=2),
     r"has tensors model\.layers\.2\..* and 6 more, which"),
    "a misshapen tensor": (set_tensor(QUERY, np.zeros((16, 32), np.float32)),
     rf"tensor {QUERY} has shape \(16, 32\); config.json asks for \(32, 32\)"),
    "a value that is not a number": (
        set_tensor("model.norm.weight", np.full(32, np.nan, np.float32)),
        "model.safetensors: tensor model.norm.weight holds values that are not finite numbers",
    ),
    "a quantized tensor": (set_tensor(QUERY, np.zeros((32, 32), np.int8)),
     f"tensor {QUERY} is stored as I8; the readable types are"),
    "half a config": (write("config.json", '{"vocab_size": '),
     r"config\.json is not JSON: Expecting value: line 1"),
    "a list as config": (write("config.json", "[]"), r"must hold a JSON object, not a list"),
    "a tokenizer that is too large": (save_byte_level,
     r"token 'Ġthe' of its tokenizer has id 260, but the embedding has only 96 rows"),
    "a broken tokenizer": (write("tokenizer.json", "nonsense"), r"json is not a readable token"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_with_a_checkpoint_is_named(folder, case):
    spoil, message = SPOILED[case]
    spoil(folder)
    with pytest.raises(UserError, match=message):
        load_base(str(folder))


def test_only_the_part_that_is_asked_for_is_read_and_looked_at(folder):
    edit_tensors(folder, lambda tensors: tensors[QUERY].__setitem__((slice(None), 0), np.nan))

    def place(path, leaf):
        if path == ("layers_1", "attention", "qkv"):
            assert leaf[1:, :, :, :].shape == (leaf.shape[0] - 1, *leaf.shape[1:])
            with pytest.raises(UserError, match=f"{QUERY} holds values that are not finite"):
                leaf[:1, :, :, :]
        return jnp.zeros(leaf.shape)

    load_base(str(folder), place=place)


def test_an_added_token_beyond_the_embedding_is_refused_only_where_it_is_used(folder):
    words = {f"w{index}": index for index in range(96)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = load_base(str(folder)).config
    read, vocabulary = load_tokenizer(folder), config.vocab_size
    assert encode_prompt(Prompt(0, "row 0", "w3 w95"), read, vocabulary) == [3, 95]
    with pytest.raises(UserError, match="row 0: token id 96 is outside the base's vocabulary"):
        encode_prompt(Prompt(0, "row 0", "w3 <image>"), read, vocabulary)


TYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_bad_value_anywhere_is_found(dtype, value):
    largest = ml_dtypes.finfo(dtype).max
    array = np.full((3, 400_000), largest, dtype)  # more than one chunk
    array[0, :4] = [-largest, 0, -0.0, ml_dtypes.finfo(dtype).smallest_subnormal]
    assert is_finite(array)
    for place in [(0, 0), (2, 399_999)]:
        spoilt = array.copy()
        spoilt[place] = value
        assert not is_finite(spoilt)
        assert not is_finite(spoilt.T)


def test_integers_and_nothing_are_finite():
    for array in (np.full(3, -1, np.int64), np.ones(3, bool), np.zeros((0, 4), np.float32)):
        assert is_finite(array)
