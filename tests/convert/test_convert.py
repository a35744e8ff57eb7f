"""The convert command: exact round trips, and what a layout cannot hold."""

import dataclasses
import itertools
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from clover_jax.checkpoints import tensor_files
from clover_jax.checkpoints.base import fingerprint
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.drafters import registry
from tests.tiny_checkpoints import (
    assert_same_tensors,
    assert_trees_equal,
    copy_of,
    edit_json,
    edit_tensors,
    random_leaves,
)
from tests.tiny_folders import SPEAKING, save_draft, save_random_head, save_tiny_base

WEIGHTS = "model.safetensors"
MLP = "clover_head_mlp.weight"


def test_there_and_back_again_is_exact(command, reference, tmp_path):
    """In the type of the file; `test_layouts.py` has the other layouts."""
    head = copy_of(reference / "clover2", tmp_path / "head")
    edit_tensors(head, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    base = f"--base={reference / 'base'}"
    native, foreign, again = tmp_path / "native", tmp_path / "foreign", tmp_path / "again"
    status, report, _ = command(base, f"--input={head}", f"--output={native}")
    assert status == 0
    named = {"from": "clover2", "to": "orbax", "drafter": "clover2", "dtype": "bfloat16"}
    assert named.items() <= report.items()
    assert command(base, f"--input={native}", f"--output={foreign}", "--to=clover2")[0] == 0
    assert_same_tensors(head, foreign)
    assert command(base, f"--input={foreign}", f"--output={again}")[0] == 0
    loaded = load_base(str(reference / "base"))
    one, other = (load_draft(folder, loaded) for folder in (native, again))
    assert one.head.config == other.head.config
    assert_trees_equal(one.params, other.params)


@pytest.mark.parametrize("layout", ["medusa", "medusa_vllm"])
def test_medusas_heads_go_out_and_come_back(command, speaking, tmp_path, layout):
    base, drafts = load_base(str(speaking / "base")), [tmp_path / "draft", tmp_path / "again"]
    head_config = registry.config_for_base("medusa", base.config, num_positions=3)
    params = random_leaves(registry.init_shapes(registry.head(head_config), base.params))
    save_draft(drafts[0], head_config, params, "clover4", fingerprint(base), {})
    given, foreign = f"--base={speaking / 'base'}", tmp_path / "foreign"
    assert command(given, f"--input={drafts[0]}", f"--output={foreign}", f"--to={layout}")[0] == 0
    assert command(given, f"--input={foreign}", f"--output={drafts[1]}")[1]["from"] == layout
    for draft in (load_draft(drafts[1], base), load_draft(foreign, base)):
        assert draft.head.config == head_config
        assert_trees_equal(draft.params, params)
    stored = load_file(next(foreign.glob("*.safetensors")))
    first = "0.0.linear.weight" if layout == "medusa" else "blocks.0.layers.0.weight"
    # x @ W here, W x there.
    np.testing.assert_array_equal(stored[first], np.asarray(params["heads"]["weight"][0]).T)


def test_an_eagle_head_goes_out_for_speculators(command, reference, tmp_path):
    base = f"--base={reference / 'base'}"
    given = (base, f"--input={reference / 'eagle1'}", f"--output={tmp_path / 'out'}")
    status, _, error = command(*given, "--to=speculators")
    assert (status, "no current vLLM reads EAGLE-1 heads as speculators" in error) == (0, True)
    assert_same_tensors(reference / "eagle1", tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["speculators_config"]["algorithm"] == "eagle"
    assert values["transformer_layer_config"]["num_attention_heads"] == 4
    loaded = load_base(str(reference / "base"))
    one, other = load_draft(reference / "eagle1", loaded), load_draft(tmp_path / "out", loaded)
    assert one.head.config == other.head.config


def test_an_eagle3_head_goes_out_for_speculators_and_comes_back(command, fixtures_dir, tmp_path):
    """To vLLM's names and config, from there home, and from home back to the official layout."""
    reference = fixtures_dir / "eagle3_reference"
    base = copy_of(reference / "base", tmp_path / "base")
    edit_json(base / "config.json", architectures=["MistralForCausalLM"])
    steps = [reference / "eagle3", *(tmp_path / name for name in ("out", "native", "back"))]
    targets = ("speculators", "orbax", "eagle3")
    for (source, result), to in zip(itertools.pairwise(steps), targets, strict=True):
        argv = (f"--base={base}", f"--input={source}", f"--output={result}", f"--to={to}")
        assert command(*argv)[0] == 0
    assert_same_tensors(reference / "eagle3", tmp_path / "back")
    written, official = load_file(tmp_path / "out" / WEIGHTS), load_file(steps[0] / WEIGHTS)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in official.items()}
    renamed["embed_tokens.weight"] = load_file(base / WEIGHTS)["model.embed_tokens.weight"]
    assert {name: (x.dtype, x.tobytes()) for name, x in written.items()} == {
        name: (x.dtype, x.tobytes()) for name, x in renamed.items()
    }
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["Eagle3Speculator"]
    assert values["transformer_layer_config"]["vocab_size"] == 96
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    verifier = {"name_or_path": str(base), "architectures": ["MistralForCausalLM"]}
    assert values["speculators_config"]["verifier"] == verifier
    loaded = load_base(str(base))
    assert_trees_equal(load_draft(steps[1], loaded).params, load_draft(steps[0], loaded).params)
    # No ids stand for the method's own states.
    for ids in (None, []):
        edit_json(tmp_path / "out" / "config.json", eagle_aux_hidden_state_layer_ids=ids)
        features = load_draft(steps[1], loaded).head.config.features
        assert features == ("layer_2", "layer_4", "layer_5")


VOCABULARY = {"draft_to_target": (0, 5, 6, 95)}
CANNOT_HOLD = {
    "clover_lr": (("clover_lr", {"rank": 4}), "clover2",
     "--to=clover2 holds clover2 heads, and this is one of kind clover_lr, which no other"),
    "clover": (("clover",), "clover2", "of kind clover, which no other program's layout holds"),
    "eagle as medusa": (("eagle",), "medusa",
     "which can be written as orbax, eagle, eagle_vllm, eagle_sglang, speculators"),
    "clover2 for vLLM": (("clover2",), "speculators",
     "--to=speculators holds eagle and eagle3 heads, and this is one of kind clover2"),
    "clover2, few tokens": (("clover2", VOCABULARY), "clover2", "layout has no draft vocabulary"),
    "eagle, few tokens": (("eagle", VOCABULARY), "eagle", "layout has no draft vocabulary"),
    "medusa, few tokens": (("medusa", VOCABULARY), "medusa", "layout has no draft vocabulary"),
    "eagle3 of a short base, for vLLM": (("eagle3",), "speculators",
     "reads layer_1, layer_1, pre_norm of its base, but vLLM gives heads the states that"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT_HOLD)
def test_what_a_layout_cannot_hold_is_refused_with_the_reason(command, speaking, tmp_path, case):
    (kind, *given), to, message = CANNOT_HOLD[case]
    changes = given[0] if given and "draft_to_target" in given[0] else {}
    options = {} if changes or not given else given[0]
    base = load_base(str(speaking / "base"))
    save_random_head(tmp_path / "head", base, kind, options, **changes)
    argv = (f"--base={speaking / 'base'}", f"--input={tmp_path / 'head'}", f"--to={to}")
    status, _, error = command(*argv, f"--output={tmp_path / 'out'}")
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_vllm_takes_a_head_that_reads_other_states(command, fixtures_dir, tmp_path):
    """The official layout cannot store which states a head reads; speculators' can.

    A short base needs the state after the last layer, whose id is the number of layers.
    """
    short = save_tiny_base(tmp_path / "base", dataclasses.replace(SPEAKING, num_layers=4))
    other = {"features": ("layer_1", "layer_3", "layer_7")}
    cases = {
        "other": (fixtures_dir / "eagle3_reference" / "base", other, [1, 3, 7]),
        "short": (short, {}, [1, 2, 4]),
    }
    for name, (base, changes, ids) in cases.items():
        head, out = tmp_path / name / "head", tmp_path / name / "out"
        save_random_head(head, load_base(str(base)), "eagle3", **changes)
        argv = (f"--base={base}", f"--input={head}", f"--output={out}", "--to=speculators")
        assert command(*argv)[0] == 0
        fields = json.loads((out / "config.json").read_text())
        assert fields["eagle_aux_hidden_state_layer_ids"] == ids
        one, back = (load_draft(folder, load_base(str(base))) for folder in (head, out))
        assert back.head.config.features == one.head.config.features


def test_a_padded_vocabulary_is_cut_only_when_asked(command, reference, tmp_path):
    head = copy_of(reference / "clover2", tmp_path / "head")

    def pad(tensors):
        for name in ("lm_head.weight", "clover_embed_tokens.weight"):
            tensors[name] = np.pad(tensors[name], ((0, 32), (0, 0)))

    edit_tensors(head, pad)
    edit_json(head / "config.json", vocab_size=128)
    arguments = (f"--base={reference / 'base'}", f"--input={head}", "--to=clover2")
    status, _, error = command(*arguments, f"--output={tmp_path / 'out'}")
    assert (status, "where the last 32 rows are padding, --cut_vocab" in error) == (2, True)
    assert command(*arguments, f"--output={tmp_path / 'out'}", "--cut_vocab")[0] == 0
    assert_same_tensors(reference / "clover2", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 96


def test_without_torch_an_error_says_how_to_get_safetensors(
    command, reference, tmp_path, monkeypatch
):
    head = copy_of(reference / "clover2", tmp_path / "head")
    (head / WEIGHTS).rename(head / "pytorch_model.bin")
    monkeypatch.setattr(tensor_files.importlib.util, "find_spec", lambda name: None)
    arguments = (f"--base={reference / 'base'}", f"--input={head}", f"--output={tmp_path / 'out'}")
    status, _, error = command(*arguments)
    assert status == 2
    assert "torch, which reads them, is not installed; save the weights as model.safetens" in error


def test_what_is_there_is_replaced_only_when_asked(command, reference, tmp_path):
    arguments = (f"--base={reference / 'base'}", f"--input={reference / 'clover2'}")
    (tmp_path / "out").mkdir()
    status, _, error = command(*arguments, f"--output={tmp_path / 'out'}")
    assert (status, "exists already; give another --output, or --overwrite" in error) == (2, True)
    assert command(*arguments, f"--output={tmp_path / 'out'}", "--overwrite")[0] == 0
    assert (tmp_path / "out" / "draft.json").is_file()


def test_what_is_no_head_is_not_replaced_nor_what_holds_the_input(command, reference, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("years of work")
    base = f"--base={reference / 'base'}"
    flags = (base, f"--input={reference / 'clover2'}", "--overwrite")
    status, _, error = command(*flags, f"--output={tmp_path / 'notes'}")
    assert (status, "is not a draft head, so --overwrite does not delete it" in error) == (2, True)
    assert (tmp_path / "notes" / "notes.txt").exists()

    work = tmp_path / "work"
    assert command(*flags, f"--output={work / 'draft'}")[0] == 0
    for output in (work, work / "draft"):  # a workdir stands for the head in it
        status, _, error = command(base, f"--input={work}", f"--output={output}", "--overwrite")
        assert (status, "is or holds the input; give another folder" in error) == (2, True)
    assert (work / "draft" / "draft.json").is_file()


def test_a_base_is_not_replaced_by_a_head(command, reference, tmp_path):
    """A base's folder has a config.json as others' heads have; --base itself is refused by name."""
    base, other = (copy_of(reference / "base", tmp_path / name / "base") for name in "ab")
    given = (f"--base={base}", f"--input={reference / 'clover2'}", "--overwrite")
    for output, message in {
        base: "is or holds the base; give another folder",
        base.parent: "is or holds the base; give another folder",
        other: "is not a draft head, so --overwrite does not delete it",
    }.items():
        status, _, error = command(*given, f"--output={output}")
        assert (status, message in error) == (2, True)
        assert_same_tensors(reference / "base", base)
        assert_same_tensors(reference / "base", other)


@pytest.mark.parametrize("name", ["clover2", "eagle1"])
def test_a_head_in_a_layout_of_others_is_replaced_when_asked(command, reference, tmp_path, name):
    out = copy_of(reference / name, tmp_path / "out")
    given = (f"--base={reference / 'base'}", f"--input={reference / 'clover2'}")
    assert command(*given, f"--output={out}", "--overwrite")[0] == 0
    assert (out / "draft.json").is_file()


def test_a_missing_flag_is_named(command):
    assert command("--output=x")[2] == "clover_jax.convert: --input is missing; give the folder\n"
