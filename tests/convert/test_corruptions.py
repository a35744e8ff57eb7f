"""Each way to spoil a head is reported in one line, and nothing is left behind."""

import hashlib
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation import conversion
from clover_jax.evaluation.options import ConvertOptions
from tests.convert.spoiling import (
    DOWN,
    MLP,
    WEIGHTS,
    base_config,
    cast,
    config,
    cut_file,
    header_of,
    index_with,
    other_lm_head,
    remove,
    set_value,
    tensors,
    text,
)
from tests.tiny_checkpoints import copy_of, edit_json
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

# Third-party heads: name -> (how it is spoilt, the message).
CLOVER2 = {
    "tensor missing": (tensors(lambda t: t.pop(MLP)), "lacks tensor clover_head_mlp.weight"),
    "two tensors missing": (
        tensors(lambda t: (t.pop(MLP), t.pop(DOWN))),
        "lacks tensors layers.1.mlp.down_proj.weight, clover_head_mlp.weight",
    ),
    "copy of the output matrix missing": (
        tensors(lambda t: t.pop("lm_head.weight")),
        "lacks tensor lm_head.weight",
    ),
    "extra tensor": (
        tensors(lambda t: t.update(more=np.zeros(2, np.float32))),
        "has tensor more, which its config.json does not ask for",
    ),
    "transposed": (
        tensors(lambda t: t.update({DOWN: np.ascontiguousarray(t[DOWN].T)})),
        f"tensor {DOWN} has shape",
    ),
    "one row short": (
        tensors(lambda t: t.update({MLP: t[MLP][:-1]})),
        "tensor clover_head_mlp.weight has shape (31, 32); config.json asks for (32, 32)",
    ),
    "bias of another rank": (
        tensors(lambda t: t.update({"clover_head_mlp.bias": np.zeros((1, 32), np.float32)})),
        "clover_head_mlp.bias has shape (1, 32)",
    ),
    "integers": (cast(MLP, np.int32), f"tensor {MLP} is stored as I32; the readable types"),
    "eight bits": (cast(DOWN, np.int8), f"tensor {DOWN} is stored as I8"),
    "mixed types": (cast(MLP, np.float16), f"tensor {MLP} is stored as float16,"),
    "NaN": (set_value(MLP, np.nan), f"tensor {MLP} holds values that are not finite"),
    "infinity": (set_value(DOWN, np.inf), f"tensor {DOWN} holds values that are not finite"),
    "NaN in a norm": (set_value("clover_norm.weight", np.nan), "tensor clover_norm.weight holds"),
    "NaN in the output matrix": (
        set_value("lm_head.weight", np.nan),
        "tensor lm_head.weight holds values",
    ),
    "other embedding": (set_value("clover_embed_tokens.weight", 9.0, (3, 0)), "(first in row 3)"),
    "base with another lm_head": (other_lm_head, "lm_head.weight differs from the output matrix"),
    "config of a wider base": (config(hidden_size=64), "the head's hidden_size is 64, but"),
    "config of another vocabulary": (config(vocab_size=64), "the head's vocab_size is 64, but"),
    "more vocabulary": (config(vocab_size=128), "vocab_size is 128, but the base"),
    "more layers than tensors": (
        config(clover={"num_heads": 5, "num_layers": 3}),
        "lacks tensors layers.2.",
    ),
    "fewer layers than tensors": (
        config(clover={"num_heads": 5, "num_layers": 1}),
        "has tensors layers.1.",
    ),
    "no positions": (config(clover={"num_heads": 0, "num_layers": 2}), "clover.num_heads must be"),
    "a weight that is no number": (
        config(clover={"num_heads": 5, "num_layers": 2, "heads_coefficient": "x"}),
        "clover.heads_coefficient must be a number, not 'x'",
    ),
    "heads that do not divide": (config(num_attention_heads=5), "must be divisible by num_att"),
    "other head count": (config(num_key_value_heads=4), "k_proj.weight has shape"),
    "as many layers as stars": (
        config(clover={"num_heads": 5, "num_layers": 10**9}),
        "clover.num_layers is 1000000000; at most 10000 are possible",
    ),
    "as many layers in the base": (
        base_config(num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000; at most",
    ),
    "not a number": (config(intermediate_size="big"), "intermediate_size must be a positive"),
    "another activation": (config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "config gone": (remove("head/config.json"), "nor config.json (third-party layouts)"),
    "config cut": (cut_file("head/config.json", 40), "config.json is not JSON"),
    "config a list": (text("head/config.json", "[1]"), "must hold a JSON object, not a list"),
    "config not UTF-8": (
        lambda folder: (folder / "head/config.json").write_bytes(b'{"a": "\xff"}'),
        "config.json is not JSON",
    ),
    "config nested without end": (
        text("head/config.json", '{"a":' + "[" * 200_000),
        "config.json is not JSON that can be read: it is nested too deeply",
    ),
    "no layout at all": (config(clover=...), "is an official Clover-2 head without the"),
    "weights gone": (remove(f"head/{WEIGHTS}"), "has no weights"),
    "weights cut": (cut_file(f"head/{WEIGHTS}", 20_000), "is not a whole safetensors file"),
    "header cut": (cut_file(f"head/{WEIGHTS}", 5), "is not a whole safetensors file"),
    "weights are text": (text(f"head/{WEIGHTS}", "hello"), "is not a whole safetensors file"),
    "header of a terabyte": (
        lambda folder: (folder / "head" / WEIGHTS).write_bytes(b"\xff" * 64),
        "is not a whole safetensors file",
    ),
    "header that is no JSON": (header_of("{]"), "is not a whole safetensors file"),
    "offsets beyond the file": (
        header_of('{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
        "is not a whole safetensors file",
    ),
    "shard elsewhere": (
        index_with("../elsewhere.safetensors"),
        "lists the shard '../elsewhere.safetensors', which is not a file next to it",
    ),
    "shard by an absolute path": (index_with("/etc/passwd"), "lists the shard '/etc/passwd'"),
    "shard missing": (index_with("model-2.safetensors"), "lacks shard model-2.safetensors"),
    "index without a map": (
        lambda folder: (
            (folder / "head" / WEIGHTS).unlink(),
            (folder / "head" / (WEIGHTS + ".index.json")).write_text("{}"),
        ),
        "has no weight_map",
    ),
    "base of another architecture": (
        base_config(architectures=["GPT2LMHeadModel"]),
        "architecture GPT2LMHeadModel is not supported",
    ),
    "base without weights": (remove(f"base/{WEIGHTS}"), "lacks shard"),
    "base cut": (cut_file(f"base/{WEIGHTS}", 9000), "base/model.safetensors is not a whole"),
    "base with fewer layers": (base_config(num_hidden_layers=2), "base has tensors model.layers.2"),
    "base config broken": (cut_file("base/config.json", 25), "base/config.json is not JSON"),
}
SPECULATORS = {
    "norm unsaid": (config(norm_before_residual=...), "norm_before_residual is missing; only"),
    "norm before the residual": (
        config(norm_before_residual=True),
        "norm_before_residual is True; only heads with false can be read",
    ),
    "a state beyond the base": (
        config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        "eagle_aux_hidden_state_layer_ids must be 3 different ids from 0 to 8, the number of the",
    ),
    "a state twice": (
        config(eagle_aux_hidden_state_layer_ids=[2, 2, 5]),
        "in ascending order, not [2, 2, 5]",
    ),
    "no layer": (config(transformer_layer_config=...), "has no transformer_layer_config object"),
    "another algorithm": (
        config(speculators_model_type="mlp"),
        "speculators_model_type 'mlp' cannot be read, only 'eagle' and 'eagle3'",
    ),
    "draft vocabulary of another size": (
        config(draft_vocab_size=39),
        "tensor d2t must have shape (39,), as config.json says; found (40,)",
    ),
    "an id beyond the vocabulary": (
        tensors(lambda t: t["d2t"].__setitem__(-1, 90)),
        "d2t and t2d disagree",
    ),
    "no table": (tensors(lambda t: t.pop("t2d")), "tensor t2d must have shape (96,)"),
    "no embedding": (
        tensors(lambda t: t.pop("embed_tokens.weight")),
        "lacks tensor embed_tokens.weight",
    ),
    "embedding of another base": (
        set_value("embed_tokens.weight", 9.0, (4, 0)),
        "embed_tokens.weight differs from the input embedding of the base",
    ),
    "official names": (
        tensors(lambda t: t.update({"midlayer.norm.weight": t.pop("norm.weight")})),
        "lacks tensor norm.weight",
    ),
    "NaN": (set_value("fc.weight", np.nan), "tensor fc.weight holds values that are not finite"),
}

# Draft directories, spoilt or used with another base.
OUR_TOKENIZER = "3abccf9bda48"  # the start of the byte-level tokenizer's hash
OTHER_TEMPLATE = CHAT_TEMPLATE + "!"


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def card(**changes):
    return lambda folder: edit_json(folder / "head" / "draft.json", **changes)


def fingerprint_of(**changes):
    def spoil(folder):
        path = folder / "head" / "draft.json"
        edit_json(path, base=json.loads(path.read_text())["base"] | changes)

    return spoil


NATIVE = {
    "card gone": (remove("head/draft.json"), "is not a draft: it has neither draft.json"),
    "card cut": (cut_file("head/draft.json", 99), "draft.json is not JSON"),
    "card of the future": (card(format_version=2), "draft.json has format_version 2; this"),
    "card without a drafter": (card(drafter=...), "draft.json has no 'drafter' object"),
    "unknown drafter": (card(drafter={"kind": "clover9"}), "drafter 'clover9' is unknown; the"),
    "unknown field": (
        lambda folder: edit_json(
            folder / "head" / "draft.json",
            drafter=json.loads((folder / "head/draft.json").read_text())["drafter"] | {"w": 1},
        ),
        "Clover2Config has no field 'w'",
    ),
    "files not listed": (card(files=...), "draft.json does not list the files of params/"),
    "another tokenizer": (
        lambda folder: save_byte_fallback(folder / "base"),
        f": tokenizer {OUR_TOKENIZER} against ",
    ),
    "another chat template": (
        lambda folder: save_byte_level(folder / "base", OTHER_TEMPLATE),
        f": chat_template {short_hash(CHAT_TEMPLATE)} against {short_hash(OTHER_TEMPLATE)}; give",
    ),
    "another lm_head": (other_lm_head, "was trained for another base than"),
    "a base of another depth": (fingerprint_of(num_layers=9), "num_layers 9 against 2"),
    "a base of other heads": (
        fingerprint_of(num_kv_heads=4, num_heads=8),
        "num_heads 8 against 4, num_kv_heads 4 against 2",
    ),
    "a base of another lm_head, another tokenizer": (
        fingerprint_of(lm_head="1" * 64, tokenizer="2" * 64),
        f"tokenizer 222222222222 against {OUR_TOKENIZER}; give the base that it was trained for",
    ),
    "number for a hash": (card(files={"d": 1}), "params/d is missing; was the draft copied whole"),
}


# PyTorch archives that are none, or hold more than weights.
class RunsCode:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("was_executed"),))


def torch_archive(write):
    def spoil(folder):
        (folder / "head" / WEIGHTS).unlink()
        write(folder / "head" / "pytorch_model.bin")

    return spoil


def zipped(entries, compression=zipfile.ZIP_STORED):
    def write(path):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)

    return torch_archive(write)


NOT_READ = "pytorch_model.bin cannot be read by torch"
TORCH = {
    "pickle with code": (
        zipped({"archive/data.pkl": pickle.dumps(RunsCode()), "archive/version": "3\n"}),
        NOT_READ,
    ),
    "bare pickle with code": (
        torch_archive(lambda path: path.write_bytes(pickle.dumps(RunsCode()))),
        NOT_READ,
    ),
    "zip bomb": (
        zipped({"archive/data.pkl": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED),
        NOT_READ,
    ),
    "compressed entries": (
        zipped({"a/data.pkl": bytes(range(250))}, zipfile.ZIP_LZMA),
        NOT_READ,
    ),
    "path tricks": (
        zipped({"archive/../../escaped": b"x"}),
        NOT_READ,
    ),
    "absolute path": (zipped({"/escaped": b"x"}), NOT_READ),
    "archive cut": (
        lambda folder: (
            zipped({"archive/data.pkl": b"x" * 500})(folder),
            cut_file("head/pytorch_model.bin", 300)(folder),
        ),
        NOT_READ,
    ),
    "archive without tensors": (zipped({"readme": b"x"}), NOT_READ),
}


def assert_refused(command, folder, head, base, corruption):
    """Convert a spoilt copy of a head and its base in `folder`."""
    spoil, message = corruption
    copy_of(head, folder / "head")
    copy_of(base, folder / "base")
    spoil(folder)
    before = sorted(path.name for path in folder.iterdir())
    argv = (f"--base={folder / 'base'}", f"--input={folder / 'head'}", f"--output={folder / 'out'}")
    status, report, error = command(*argv)
    assert (status, report) == (2, None)
    assert error.startswith("clover_jax.convert: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not Path("was_executed").exists()


@pytest.mark.parametrize("corruption", CLOVER2)
def test_a_spoilt_clover2_head(command, reference, tmp_path, corruption):
    assert_refused(
        command, tmp_path, reference / "clover2", reference / "base", CLOVER2[corruption]
    )


@pytest.fixture(scope="module")
def speculators(fixtures_dir, tmp_path_factory):
    """An EAGLE-3 head as vLLM's speculators describe it, and its base."""
    reference, folder = fixtures_dir / "eagle3_reference", tmp_path_factory.mktemp("speculators")
    copy_of(reference / "base", folder / "base")
    spec, source = ModelSpec(str(folder / "base")), str(reference / "eagle3")
    conversion.convert(ConvertOptions(spec, source, str(folder / "head"), to="speculators"))
    return folder


@pytest.mark.parametrize("corruption", SPECULATORS)
def test_a_spoilt_speculators_head(command, speculators, tmp_path, corruption):
    assert_refused(
        command, tmp_path, speculators / "head", speculators / "base", SPECULATORS[corruption]
    )


@pytest.mark.parity
@pytest.mark.parametrize("corruption", TORCH)
def test_a_spoilt_archive(command, reference, tmp_path, monkeypatch, corruption):
    monkeypatch.chdir(tmp_path)
    assert_refused(command, tmp_path, reference / "clover2", reference / "base", TORCH[corruption])


@pytest.mark.parametrize("corruption", NATIVE)
def test_a_spoilt_draft_directory(command, speaking, tmp_path, corruption):
    assert_refused(command, tmp_path, speaking / "head", speaking / "base", NATIVE[corruption])
