"""Folders that contradict themselves: what other programs leave is read, or named in one line."""

import dataclasses
import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_jax.checkpoints.config_json import tell_unknown
from clover_jax.checkpoints.layouts import LAYOUTS
from clover_jax.checkpoints.loading import ARCHITECTURES, load_base, read_checkpoint
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.checkpoints.tensor_files import TensorFiles
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from tests.checkpoints.test_loading import split_in_shards
from tests.foreign_heads import write_layout
from tests.tiny_checkpoints import (
    assert_trees_equal,
    copy_of,
    edit_json,
    edit_tensors,
    random_base,
    random_leaves,
)
from tests.tiny_models import TINY

INDEX = "model.safetensors.index.json"


def rename(folder, new_name):
    def edit(tensors):
        renamed = {new_name(name): value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_tensors(folder, edit)


@pytest.mark.parametrize(
    "new_name, example",
    [
        ("module.{}", "module.lm_head.weight is read as lm_head.weight"),
        ("_orig_mod.{}", "_orig_mod.lm_head.weight is read as lm_head.weight"),
        ("module._orig_mod.{}", "module._orig_mod.lm_head.weight is read as lm_head.weight"),
        ("base_model.model.{}", "base_model.model.lm_head.weight is read as lm_head.weight"),
        (lambda name: name.replace(".layers.", ".layers._orig_mod."),
         "model.layers._orig_mod.0.input_layernorm.weight is read as model.layers.0.input"),
        (lambda name: name.replace("model.", "model.language_model."),
         "model.language_model.embed_tokens.weight is read as model.embed_tokens.weight"),
        ("language_model.{}", "language_model.lm_head.weight is read as lm_head.weight"),
    ],
)  # fmt: skip
def test_prefixes_of_trainers_are_left_out_and_named(
    folder, reference_dir, capsys, new_name, example
):
    rename(folder, new_name.format if isinstance(new_name, str) else new_name)
    assert_trees_equal(load_base(str(folder)).params, load_base(str(reference_dir)).params)
    said = capsys.readouterr().err
    assert f"{folder}: names of tensors were written by a trainer: {example}" in said
    assert len(said.splitlines()) == 1


def test_a_head_with_a_trainers_prefix_is_recognized(fixtures_dir, tmp_path, capsys):
    base = load_base(str(fixtures_dir / "clover2_reference" / "base"))
    head = copy_of(fixtures_dir / "clover2_reference" / "clover2", tmp_path / "head")
    expected = load_draft(str(head), base).params
    rename(head, "module.{}".format)
    assert_trees_equal(load_draft(str(head), base).params, expected)
    assert "module." in capsys.readouterr().err


def test_a_tensor_under_two_names_or_in_two_shards_is_refused(folder, tmp_path):
    both = copy_of(folder, tmp_path / "both")
    edit_tensors(
        both, lambda tensors: tensors.update({"module.lm_head.weight": tensors["lm_head.weight"]})
    )
    with pytest.raises(UserError, match="module.lm_head.weight and lm_head.weight are one tensor"):
        load_base(str(both))

    first, second, _ = split_in_shards(folder)
    tensors = load_file(folder / first)
    name = min(tensors)
    save_file(load_file(folder / second) | {name: tensors[name]}, folder / second)
    with pytest.raises(UserError, match=f"tensor {name} lies in {first} and in {second}; one of"):
        load_base(str(folder))


def test_an_index_that_names_shards_wrongly_is_corrected_and_named(folder, reference_dir, capsys):
    split_in_shards(folder)
    expected = load_base(str(reference_dir)).params
    values = json.loads((folder / INDEX).read_text())
    places = values["weight_map"]
    names = sorted(places)
    shards = sorted(set(places.values()))
    places[names[0]] = next(shard for shard in shards if shard != places[names[0]])
    del places[names[1]]
    (folder / INDEX).write_text(json.dumps(values))
    assert_trees_equal(load_base(str(folder)).params, expected)
    said = capsys.readouterr().err
    assert f"{INDEX} names another shard, or none, for tensors {names[0]}, {names[1]}; it" in said


def test_weights_that_are_not_read_are_named(folder, capsys):
    for name in ("adapter_model.safetensors", "consolidated.00.pth", "optimizer.pt"):
        (folder / name).write_bytes(b"x")
    load_base(str(folder))
    assert capsys.readouterr().err == (
        f"{folder}: weights that are not read: files adapter_model.safetensors, "
        "consolidated.00.pth\n"
    )


def test_an_output_matrix_that_differs_from_the_embedding_is_read(folder, reference_dir, capsys):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    base = load_base(str(folder))
    assert_trees_equal(base.params, load_base(str(reference_dir)).params)
    assert not base.config.tie_word_embeddings
    assert "lm_head.weight differs from the embedding, to which config" in capsys.readouterr().err


def test_the_text_of_a_model_for_images_has_names_of_two_versions(tmp_path, capsys):
    for name in ("model.language_model.norm.weight", "language_model.model.norm.weight"):
        save_file({name: np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
        files = TensorFiles(tmp_path)
        files.check({"language_model.model.norm.weight": (3,)}, harmless=lambda name: False)
        files.read("language_model.model.norm.weight")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["x.safetensors", "model.safetensors", "config.json", "tokenizer.json"]
)
def test_a_pipe_is_refused_and_nothing_waits_for_it(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for load in (load_base, lambda source: load_draft(source, None)):
        with pytest.raises(UserError, match=f"{name} is neither a file nor a folder"):
            load(str(folder))


@pytest.mark.parametrize("below", ["snapshots/abc", "checkpoint-500", "models--o--n/snapshots/abc"])
def test_a_folder_with_the_model_below_says_where_it_is(folder, tmp_path, below):
    outer = tmp_path / "models--owner--name"
    (outer / below).parent.mkdir(parents=True)
    folder.rename(outer / below)
    message = f"one lies in {outer / below}: pass that folder"
    with pytest.raises(UserError, match=f"{outer} has no config.json; {message}"):
        load_base(str(outer))
    with pytest.raises(UserError, match=message):
        load_draft(str(outer), None)
    # A trainer leaves its config next to the folders of its checkpoints.
    (outer / "config.json").write_bytes((outer / below / "config.json").read_bytes())
    with pytest.raises(UserError, match=f"has no weights: .*; {message}"):
        load_base(str(outer))


def published_medusa(folder, tokens, width, count, heads_in_config):
    """Write heads in Medusa's own layout."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {}
    for head in range(count):
        tensors[f"{head}.0.linear.weight"] = rng.normal(size=(width, width))
        tensors[f"{head}.0.linear.bias"] = rng.normal(size=width)
        tensors[f"{head}.1.weight"] = rng.normal(size=(tokens, width))
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    fields = {"medusa_num_heads": heads_in_config, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_medusas_published_heads_count_fewer_in_their_config(reference_dir, tmp_path, capsys):
    base = load_base(str(reference_dir))
    shape = base.config.vocab_size, base.config.hidden_size
    draft = load_draft(str(published_medusa(tmp_path / "a", *shape, 5, 2)), base)
    assert draft.head.config.num_positions == 5
    assert "medusa_num_heads is 2, and the file holds 5 heads; all of" in capsys.readouterr().err
    with pytest.raises(UserError, match="lacks tensors 3.0.linear.weight"):
        load_draft(str(published_medusa(tmp_path / "b", *shape, 3, 4)), base)


ODD = ({}, [], "", "x", [1], {"a": 1}, -1, 0, 1.5, True, False, 10**400, float("nan"), None)
# Every field that a parser of a family reads, and what it may not be.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": None, "rope_parameters": None,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "quantization_config": None, "sliding_window": 8, "layer_types": None,
    "use_sliding_window": True, "max_window_layers": 1, "original_max_position_embeddings": None,
    "partial_rotary_factor": 1.0, "model_max_length": 64, "z_loss_weight": 0,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 2, "use_bidirectional_attention": False,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip
ROPES = (
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
     "mscale_all_dim": 1.0, "truncate": True, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0],
     "original_max_position_embeddings": 32},
)  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Mistral", "Qwen2", "Qwen3", "BaiChuan", "Baichuan", "Mixtral", "Qwen3Moe"),
        *("GptOss", "Phi3", "Gemma2", "Gemma3", "Gemma4"),
    ],
)
def test_odd_values_of_any_field_are_read_or_refused_in_one_line(tmp_path, family):
    values = LLAMA | {"architectures": [f"{family}ForCausalLM"], "model_type": "other"}
    configs = [(values, name) for name in LLAMA if name != "model_type"]
    for rope in ROPES:
        configs += [(values | {"rope_scaling": rope}, ("rope_scaling", name)) for name in rope]
    for fields, name in configs:
        for odd in ODD:
            if isinstance(name, tuple):
                changed = fields | {name[0]: fields[name[0]] | {name[1]: odd}}
            else:
                changed = fields | {name: odd}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            said = mistake_of(lambda: read_checkpoint(tmp_path))
            assert said is None or said.startswith(f"{tmp_path}"), (name, odd)


def mistake_of(read):
    """Return the line that refuses what is read, None where it is not refused."""
    try:
        read()
    except UserError as error:
        (line,) = str(error).splitlines()
        return line
    return None


@pytest.mark.parametrize(
    "name, odd, message",
    [
        ("hidden_act", {}, "hidden_act must be text, not {}"),
        ("hidden_act", [], r"hidden_act must be text, not \[\]"),
        ("model_type", {}, "model_type must be text"),
        ("attention_bias", "false", "attention_bias must be true or false, not 'false'"),
        ("tie_word_embeddings", [], "tie_word_embeddings must be true or false"),
        ("rope_scaling", [], r"rope_scaling must be an object or null, not \[\]"),
        ("rope_scaling", {"rope_type": []}, r"rope_scaling.rope_type must be text, not \[\]"),
        ("quantization_config", [], "quantization_config must be an object or null"),
        ("bos_token_id", [1], "bos_token_id must be a whole number"),
        ("vocab_size", True, "vocab_size must be a positive whole number, not True"),
        ("hidden_size", 10**30, "hidden_size is 1000.*at most"),
        ("eos_token_id", [True], "eos_token_id must be a whole number or a list"),
    ],
)
def test_the_type_of_a_field_is_checked_before_its_value(folder, name, odd, message):
    edit_json(folder / "config.json", **{name: odd})
    with pytest.raises(UserError, match=f"config.json: {message}"):
        load_base(str(folder))


def test_fields_that_nobody_knows_are_named(folder, capsys):
    edit_json(folder / "config.json", num_local_experts=4, unknown_key={})
    load_base(str(folder))
    assert capsys.readouterr().err == (
        f"{folder}/config.json: 2 fields not read, unknown for llama: num_local_experts, "
        "unknown_key\n"
    )


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("qwen3_moe", {"num_experts": 8}),
        ("qwen3_vl_moe_text", {"num_experts": 8, "norm_topk_prob": True}),
        ("qwen3_next", {"full_attention_interval": 4, "mtp_num_hidden_layers": 1}),
        ("qwen3_5_text", {"full_attention_interval": 4, "mtp_use_dedicated_embeddings": False}),
        ("qwen3_5_moe_text", {"full_attention_interval": 4, "mtp_num_hidden_layers": 1}),
    ],
)
def test_fields_that_we_read_are_not_named(tmp_path, capsys, kind, fields):
    tell_unknown(fields, tmp_path / "config.json", kind)
    assert capsys.readouterr().err == ""


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"rope_scaling": YARN | {"extra": 1}},
         "1 field not read, unknown for llama: rope_scaling.e"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}},
         "differ; rope_scaling is r"),
        ({"rope_parameters": {"rope_theta": 5e5}},
         "rope_theta is 10000.0, but 500000.0 within the"),
        ({"eos_token_id": [2, 5]}, r"eos_token_id \[5\] does not end texts, as generation_config"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_named(folder, capsys, fields, said):
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    read_checkpoint(folder)
    assert capsys.readouterr().err == ""
    edit_json(folder / "config.json", **fields)
    read_checkpoint(folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"{folder}/config.json: .*{said}", line)


def test_tensors_that_a_family_leaves_out_are_counted(folder, monkeypatch, capsys):
    family = dataclasses.replace(ARCHITECTURES["LlamaForCausalLM"], ignored=r"mtp\..*")
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", family)
    extra = {"mtp.fc.weight": np.ones(2, np.float32), "mtp.norm.weight": np.ones(2, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    load_base(str(folder))
    said = f"{folder}: 2 tensors not read, which text does not need: mtp."
    assert capsys.readouterr().err.startswith(said)


def test_a_key_that_stands_twice_is_refused(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"hidden_size": 64, ' + text.lstrip()[1:])
    with pytest.raises(
        UserError, match="config.json is not JSON: the key 'hidden_size' is there tw"
    ):
        load_base(str(folder))


FOREIGN = ("eagle3", "dflash2", "clover2", "eagle", "medusa", "medusa_vllm", "speculators")


@pytest.mark.parametrize("name", FOREIGN)
def test_fields_of_a_heads_config_that_nobody_knows_are_named(tmp_path, capsys, name):
    """Ours and those that the layouts' own tools write are known."""
    base = random_base(tmp_path, dataclasses.replace(TINY, num_layers=8))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    kind = LAYOUTS[name].kind
    options = {"own_output": True} if kind == "medusa" else {}
    config = registry.config_for_base(kind, base.config, **options)
    params = random_leaves(registry.init_shapes(registry.head(config), base.params))
    head = tmp_path / "head"
    write_layout(name, head, config, params, base)
    load_draft(str(head), base)
    assert capsys.readouterr().err == ""

    edit_json(head / "config.json", dropout_rate=0.1, own_norm={}, left_out=None)
    load_draft(str(head), base)
    said = "2 fields not read, unknown for .*: dropout_rate, own_norm"
    assert re.fullmatch(f"{head}/config.json: {said}\n", capsys.readouterr().err)


def test_fields_within_objects_of_a_heads_config_are_named(fixtures_dir, tmp_path, capsys):
    base = load_base(str(fixtures_dir / "clover2_reference" / "base"))
    head = copy_of(fixtures_dir / "clover2_reference" / "clover2", tmp_path / "head")
    clover = json.loads((head / "config.json").read_text())["clover"]
    edit_json(head / "config.json", clover=clover | {"num_experts": 2})
    load_draft(str(head), base)
    assert (
        "config.json: 1 field not read, unknown for llama: clover.num_experts"
        in capsys.readouterr().err
    )


def test_two_block_sizes_of_a_head_that_differ_are_refused(fixtures_dir, tmp_path):
    base = load_base(str(fixtures_dir / "dflash2_reference" / "base"))
    head = copy_of(fixtures_dir / "dflash2_reference" / "dflash2", tmp_path / "head")
    edit_json(head / "config.json", block_size=16)
    with pytest.raises(UserError, match="block_size is 16, but 6 within dflash_config"):
        load_draft(str(head), base)
