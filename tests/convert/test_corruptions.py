"""Each way to spoil a head is reported in one line, and nothing is left behind."""

import hashlib
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation import conversion
from clover_jax.evaluation.options import ConvertOptions
from tests.tiny_checkpoints import copy_of, edit_json, edit_tensors
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

# Ways to spoil a folder with `head` and `base`.
WEIGHTS = "model.safetensors"
MLP = "clover_head_mlp.weight"
DOWN = "layers.1.mlp.down_proj.weight"


def tensors(edit):
    return lambda folder: edit_tensors(folder / "head", edit)


def config(**changes):
    return lambda folder: edit_json(folder / "head" / "config.json", **changes)


def text(name, value):
    return lambda folder: (folder / name).write_text(value)


def set_value(name, value, index=(0, 0)):
    def edit(stored):
        stored[name][index[: stored[name].ndim]] = value

    return tensors(edit)


def cast(name, dtype):
    return tensors(lambda stored: stored.update({name: stored[name].astype(dtype)}))


def index_with(name):
    def spoil(folder):
        head = folder / "head"
        (head / WEIGHTS).rename(folder / "elsewhere.safetensors")
        index = {"weight_map": {MLP: name}}
        (head / (WEIGHTS + ".index.json")).write_text(json.dumps(index))

    return spoil


# Third-party heads: name -> (how it is spoilt, the message).
CLOVER2 = {
    "two tensors missing": (tensors(lambda t: (t.pop(MLP), t.pop(DOWN))),
     "lacks tensors layers.1.mlp.down_proj.weight, clover_head_mlp.weight"),
    "integers": (cast(MLP, np.int32), f"tensor {MLP} is stored as I32; the readable types"),
    "mixed types": (cast(MLP, np.float16), f"tensor {MLP} is stored as float16,"),
    "NaN in the output matrix": (set_value("lm_head.weight", np.nan),
     "tensor lm_head.weight holds values"),
    "a weight that is no number": (
        config(clover={"num_heads": 5, "num_layers": 2, "heads_coefficient": "x"}),
        "clover.heads_coefficient must be a number, not 'x'",
    ),
    "as many layers as stars": (config(clover={"num_heads": 5, "num_layers": 10**9}),
     "clover.num_layers is 1000000000; at most 10000 are possible"),
    "config not UTF-8": (lambda folder: (folder / "head/config.json").write_bytes(b'{"a": "\xff"}'),
     "config.json is not JSON"),
    "config nested without end": (text("head/config.json", '{"a":' + "[" * 200_000),
     "config.json is not JSON that can be read: it is nested too deeply"),
    "header of a terabyte": (lambda folder: (folder / "head" / WEIGHTS).write_bytes(b"\xff" * 64),
     "is not a whole safetensors file"),
    "shard elsewhere": (index_with("../elsewhere.safetensors"),
     "lists the shard '../elsewhere.safetensors', which is not a file next to it"),
    "base cut": (lambda folder: os.truncate(folder / "base" / WEIGHTS, 9000),
     "base/model.safetensors is not a whole"),
}  # fmt: skip
SPECULATORS = {
    "norm unsaid": (config(norm_before_residual=...), "norm_before_residual is missing; only"),
    "norm before the residual": (config(norm_before_residual=True),
     "norm_before_residual is True; only heads with false can be read"),
    "a state beyond the base": (config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
     "eagle_aux_hidden_state_layer_ids must be 3 different ids from 0 to 8, the number of the"),
    "a state twice": (config(eagle_aux_hidden_state_layer_ids=[2, 2, 5]),
     "in ascending order, not [2, 2, 5]"),
    "no layer": (config(transformer_layer_config=...), "has no transformer_layer_config object"),
    "another algorithm": (config(speculators_model_type="mlp"),
     "speculators_model_type 'mlp' cannot be read, only 'eagle' and 'eagle3'"),
    "no embedding": (tensors(lambda t: t.pop("embed_tokens.weight")),
     "lacks tensor embed_tokens.weight"),
    "official names": (tensors(lambda t: t.update({"midlayer.norm.weight": t.pop("norm.weight")})),
     "lacks tensor norm.weight"),
}  # fmt: skip

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
    "unknown drafter": (card(drafter={"kind": "clover9"}), "drafter 'clover9' is unknown; the"),
    "unknown field": (
        lambda folder: edit_json(
            folder / "head" / "draft.json",
            drafter=json.loads((folder / "head/draft.json").read_text())["drafter"] | {"w": 1},
        ),
        "Clover2Config has no field 'w'",
    ),
    "files not listed": (card(files=...), "draft.json does not list the files of params/"),
    "another tokenizer": (lambda folder: save_byte_fallback(folder / "base"),
     f": tokenizer {OUR_TOKENIZER} against "),
    "another chat template": (lambda folder: save_byte_level(folder / "base", OTHER_TEMPLATE),
     f": chat_template {short_hash(CHAT_TEMPLATE)} against {short_hash(OTHER_TEMPLATE)}; give"),
    "a base of other heads": (fingerprint_of(num_kv_heads=4, num_heads=8),
     "num_heads 8 against 4, num_kv_heads 4 against 2"),
    "a base of another lm_head, another tokenizer": (
        fingerprint_of(lm_head="1" * 64, tokenizer="2" * 64),
        f"tokenizer 222222222222 against {OUR_TOKENIZER}; give the base that it was trained for",
    ),
    "number for a hash": (card(files={"d": 1}), "params/d is missing; was the draft copied whole"),
}  # fmt: skip


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
     zipped({"archive/data.pkl": pickle.dumps(RunsCode()), "archive/version": "3\n"}), NOT_READ),
    "bare pickle with code": (
     torch_archive(lambda path: path.write_bytes(pickle.dumps(RunsCode()))), NOT_READ),
    "zip bomb": (zipped({"archive/data.pkl": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED), NOT_READ),
}  # fmt: skip


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
