"""The convert command: exact round trips, and each way to spoil a head said in one line."""

import dataclasses
import itertools
import json
import pickle
import zipfile
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.numpy import load_file

from clover_jax import cli, convert
from clover_jax.drafters import registry
from clover_jax.drafters.directory import load_draft, save_draft
from clover_jax.interchange import conversion
from clover_jax.models import torch_file
from clover_jax.models.fingerprint import fingerprint
from clover_jax.models.loading import load_base
from tests.tiny_checkpoints import assert_trees_equal, copy_of, edit_json, edit_tensors
from tests.tiny_folders import save_tiny_base, save_tiny_draft
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

WEIGHTS = "model.safetensors"
MLP = "clover_head_mlp.weight"
DOWN = "layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def reference(fixtures_dir):
    return fixtures_dir / "clover2_reference"


@pytest.fixture
def command(capsys):
    """Run the command in this process: (status, last line of stdout, stderr)."""

    def run(*argv):
        capsys.readouterr()
        status = cli.run(convert.main, convert.define_flags, [str(a) for a in argv])
        printed = capsys.readouterr()
        last = printed.out.splitlines()[-1] if printed.out else None
        return status, last and json.loads(last), printed.err

    return run


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A base with a tokenizer, and a native draft for it."""
    folder = tmp_path_factory.mktemp("speaking")
    save_tiny_base(folder / "base", template=CHAT_TEMPLATE)
    save_tiny_draft(folder / "head", folder / "base")
    return folder


def random_params(head_config, base):
    """Return params of the right shapes; nothing is compiled for them."""
    rng = np.random.default_rng(0)
    shapes = registry.init_shapes(registry.head(head_config), base.params)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


def assert_same_tensors(one, other):
    one, other = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    "folder, layout, name",
    [
        ("clover2_reference", "clover2", "clover2"),
        ("clover2_reference", "eagle", "eagle1"),
        ("eagle3_reference", "eagle3", "eagle3"),
    ],
)
def test_there_and_back_again_is_exact(command, fixtures_dir, tmp_path, folder, layout, name):
    reference = fixtures_dir / folder
    base = f"--base={reference / 'base'}"
    native, foreign, again = tmp_path / "native", tmp_path / "foreign", tmp_path / "again"
    status, report, _ = command(base, f"--input={reference / name}", f"--output={native}")
    assert status == 0
    assert (report["from"], report["to"], report["drafter"]) == (layout, "orbax", layout)
    assert command(base, f"--input={native}", f"--output={foreign}", f"--to={layout}")[0] == 0
    assert_same_tensors(reference / name, foreign)
    assert command(base, f"--input={foreign}", f"--output={again}")[0] == 0
    loaded = load_base(str(reference / "base"))
    one, other = (load_draft(folder, loaded) for folder in (native, again))
    assert one.head.config == other.head.config
    assert_trees_equal(one.params, other.params)


@pytest.mark.parametrize("layout", ["medusa", "medusa_vllm"])
def test_medusas_heads_go_out_and_come_back(command, speaking, tmp_path, layout):
    base, drafts = load_base(str(speaking / "base")), [tmp_path / "draft", tmp_path / "again"]
    head_config = registry.config_for_base("medusa", base.config, num_positions=3)
    params = random_params(head_config, base)
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
    assert command(*given, "--to=speculators")[0] == 0
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
    assert values["norm_before_residual"] is False
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (values["draft_vocab_size"], values["target_hidden_size"]) == (40, 32)
    assert values["transformer_layer_config"]["vocab_size"] == 96
    verifier = {"name_or_path": str(base), "architectures": ["MistralForCausalLM"]}
    assert values["speculators_config"]["verifier"] == verifier
    loaded = load_base(str(base))
    assert_trees_equal(load_draft(steps[1], loaded).params, load_draft(steps[0], loaded).params)


def save_head(folder, base_folder, kind, options=(), **changes):
    """Write a native draft whose config has changes that its maker does not offer."""
    base = load_base(str(base_folder))
    config = registry.config_for_base(kind, base.config, **dict(options))
    config = dataclasses.replace(config, **changes)
    save_draft(folder, config, random_params(config, base), None, fingerprint(base), {})


VOCABULARY = {"draft_to_target": (0, 5, 6, 95)}
CANNOT_HOLD = {
    "clover_lr": (
        ("clover_lr", {"rank": 4}),
        "clover2",
        "--to=clover2 holds clover2 heads, and this is one of kind clover_lr, which no other",
    ),
    "clover": (("clover",), "clover2", "of kind clover, which no other program's layout holds"),
    "eagle as medusa": (
        ("eagle",),
        "medusa",
        "which can be written as orbax, eagle, speculators",
    ),
    "clover2 for vLLM": (
        ("clover2",),
        "speculators",
        "--to=speculators holds eagle and eagle3 heads, and this is one of kind clover2",
    ),
    "clover2, few tokens": (("clover2", VOCABULARY), "clover2", "layout has no draft vocabulary"),
    "eagle, few tokens": (("eagle", VOCABULARY), "eagle", "layout has no draft vocabulary"),
    "eagle, few, for vLLM": (("eagle", VOCABULARY), "speculators", "has no draft vocabulary"),
    "medusa, few tokens": (("medusa", VOCABULARY), "medusa", "Medusa's layouts have no draft voc"),
    "eagle3 of a short base": (
        ("eagle3",),
        "eagle3",
        "this head reads layer_1, layer_1, pre_norm, but readers of the official EAGLE-3 layout",
    ),
    "eagle3 of a short base, for vLLM": (
        ("eagle3",),
        "speculators",
        "reads layer_1, layer_1, pre_norm of its base, but vLLM gives heads the states that",
    ),
}


@pytest.mark.parametrize("case", CANNOT_HOLD)
def test_what_a_layout_cannot_hold_is_refused_with_the_reason(command, speaking, tmp_path, case):
    (kind, *given), to, message = CANNOT_HOLD[case]
    changes = given[0] if given and "draft_to_target" in given[0] else {}
    options = {} if changes or not given else given[0]
    save_head(tmp_path / "head", speaking / "base", kind, options, **changes)
    argv = (f"--base={speaking / 'base'}", f"--input={tmp_path / 'head'}", f"--to={to}")
    status, _, error = command(*argv, f"--output={tmp_path / 'out'}")
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_vllm_takes_a_head_that_reads_other_layers(command, fixtures_dir, tmp_path):
    """The official layout cannot say which states a head reads; speculators' can."""
    base_folder = fixtures_dir / "eagle3_reference" / "base"
    features = ("layer_1", "layer_3", "layer_7")
    save_head(tmp_path / "head", base_folder, "eagle3", features=features)
    argv = (f"--base={base_folder}", f"--input={tmp_path / 'head'}", f"--output={tmp_path / 'out'}")
    assert command(*argv, "--to=speculators")[0] == 0
    draft = load_draft(tmp_path / "out", load_base(str(base_folder)))
    assert draft.head.config.features == features


def test_bfloat16_stays_bfloat16(command, reference, tmp_path):
    head = copy_of(reference / "clover2", tmp_path / "head")
    edit_tensors(head, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    base = f"--base={reference / 'base'}"
    assert command(base, f"--input={head}", f"--output={tmp_path / 'a'}")[1]["dtype"] == "bfloat16"
    arguments = (f"--input={tmp_path / 'a'}", f"--output={tmp_path / 'b'}", "--to=clover2")
    assert command(base, *arguments)[0] == 0
    assert_same_tensors(head, tmp_path / "b")


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


def as_torch_archive(head, **changes):
    torch = pytest.importorskip("torch")
    tensors = load_file(head / WEIGHTS) | changes
    (head / WEIGHTS).unlink()
    torch.save({k: torch.tensor(v) for k, v in tensors.items()}, head / "pytorch_model.bin")


@pytest.mark.parity
def test_pytorch_weights_are_read(command, reference, tmp_path):
    head = copy_of(reference / "clover2", tmp_path / "head")
    as_torch_archive(head)
    arguments = (f"--base={reference / 'base'}", f"--input={head}", "--to=clover2")
    assert command(*arguments, f"--output={tmp_path / 'out'}")[0] == 0
    assert_same_tensors(reference / "clover2", tmp_path / "out")


def test_without_torch_an_error_says_how_to_get_safetensors(
    command, reference, tmp_path, monkeypatch
):
    head = copy_of(reference / "clover2", tmp_path / "head")
    (head / WEIGHTS).rename(head / "pytorch_model.bin")
    monkeypatch.setattr(torch_file.importlib.util, "find_spec", lambda name: None)
    arguments = (f"--base={reference / 'base'}", f"--input={head}", f"--output={tmp_path / 'out'}")
    status, _, error = command(*arguments)
    assert status == 2
    assert "torch, which reads them, is not installed; save the weights as model.safetens" in error


def test_what_is_there_is_replaced_only_when_asked(command, reference, tmp_path):
    arguments = (f"--base={reference / 'base'}", f"--input={reference / 'clover2'}")
    (tmp_path / "out").mkdir()
    status, _, error = command(*arguments, f"--output={tmp_path / 'out'}")
    assert (status, "is there already; give another --output, or --overwrite" in error) == (2, True)
    assert command(*arguments, f"--output={tmp_path / 'out'}", "--overwrite")[0] == 0
    assert (tmp_path / "out" / "draft.json").is_file()


def test_a_missing_flag_is_named(command):
    assert command("--output=x")[2] == "clover_jax.convert: --input is missing; give the folder\n"


def test_verifying_decodes_with_both_and_prints_both_taus(command, speaking, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [5, 6, 7 + i]}) + "\n" for i in range(3)))
    arguments = (f"--base={speaking / 'base'}", f"--prompts={prompts}", "--max_new_tokens=40")
    native = (f"--input={speaking / 'head'}", f"--output={tmp_path / 'out'}", "--to=clover2")
    status, report, error = command(*arguments, *native, "--verify")
    assert status == 0
    assert report["tau_source"] == report["tau_result"] > 1
    assert (report["prompts"], report["differing"]) == (3, [])
    assert "the same accepted lengths on all 3 prompts" in error
    assert (tmp_path / "out" / WEIGHTS).is_file()


def test_a_result_that_decodes_otherwise_is_not_kept(command, speaking, tmp_path, monkeypatch):
    """Spoil what was written, as a wrong layout would."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [5, 6, 7 + i]}) + "\n" for i in range(3)))
    write = conversion.write_head

    def write_wrongly(staged, *rest):
        write(staged, *rest)
        edit_tensors(staged, lambda stored: stored[MLP].__imul__(-1))

    monkeypatch.setattr(conversion, "write_head", write_wrongly)
    status, report, error = command(
        f"--base={speaking / 'base'}",
        f"--prompts={prompts}",
        "--max_new_tokens=40",
        f"--input={speaking / 'head'}",
        f"--output={tmp_path / 'out'}",
        "--to=clover2",
        "--verify",
    )
    assert status == 1
    assert report["differing"]
    assert report["tau_result"] < report["tau_source"]
    assert "prompts differ, so nothing was written" in error
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_card_is_prepared_and_nothing_uploaded(command, speaking, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    given = (f"--base={speaking / 'base'}", f"--input={speaking / 'head'}", "--push=me/head")
    out = tmp_path / "out"
    status, report, _ = command(*given, f"--output={out}", "--card_only")
    assert (status, report["repository"], report["uploaded"]) == (0, "me/head", None)
    card = (out / "README.md").read_text()
    assert "| drafter | clover2 |" in card
    assert f"generate --base={speaking / 'base'} --draft=me/head" in card
    load_draft(out, load_base(str(speaking / "base")))  # a card more does no harm
    status, _, error = command(*given, f"--output={tmp_path / 'other'}")
    assert (status, "--push=me/head needs a token in the environment" in error) == (2, True)
    assert not (tmp_path / "other").exists()


class Hub:
    """Stands for huggingface_hub.HfApi: takes what the network would, or fails as it does."""

    def __init__(self, fails=False):
        self.fails, self.calls = fails, []

    def __call__(self, token):
        self.calls.append(("token", token))
        return self

    def create_repo(self, name, exist_ok):
        assert exist_ok
        self.calls.append(("create", name))

    def upload_folder(self, repo_id, folder_path):
        if self.fails:
            raise OfflineModeIsEnabled("Cannot reach the hub: offline mode.\nUnset it.")
        found = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append(("upload", repo_id, found))
        return "https://hub/me/head"


@pytest.fixture
def pushing(speaking, tmp_path, monkeypatch):
    """A function that makes the hub, and the flags that push to it."""
    given = {"base": speaking / "base", "input": speaking / "head", "output": tmp_path / "out"}

    def make(**options):
        hub = Hub(**options)
        monkeypatch.setattr(huggingface_hub, "HfApi", hub)
        monkeypatch.setenv("HF_TOKEN", "secret")
        return hub, [*(f"--{name}={value}" for name, value in given.items()), "--push=me/head"]

    return make


def test_a_folder_is_uploaded_with_its_card(command, pushing):
    hub, argv = pushing()
    status, report, error = command(*argv, "--to=clover2")
    assert (status, report["uploaded"]) == (0, "https://hub/me/head")
    files = ["README.md", "config.json", WEIGHTS]
    assert hub.calls == [("token", "secret"), ("create", "me/head"), ("upload", "me/head", files)]
    assert "secret" not in json.dumps(report) + error


def test_a_refused_upload_leaves_the_folder_ready(command, pushing, tmp_path):
    _, argv = pushing(fails=True)
    status, report, error = command(*argv)
    assert (status, report) == (2, None)
    said = error.splitlines()[-1]
    assert "me/head cannot be written on the hub (Cannot reach the hub: offline mode); " in said
    assert said.endswith("upload it by hand or repeat the command with --overwrite")
    assert (tmp_path / "out" / "README.md").is_file()


# Ways to spoil a head. Each takes a folder with `head`, `base` and perhaps `other`.


def tensors(edit):
    return lambda folder: edit_tensors(folder / "head", edit)


def config(**changes):
    return lambda folder: edit_json(folder / "head" / "config.json", **changes)


def card(**changes):
    return lambda folder: edit_json(folder / "head" / "draft.json", **changes)


def base_config(**changes):
    return lambda folder: edit_json(folder / "base" / "config.json", **changes)


def text(name, value):
    return lambda folder: (folder / name).write_text(value)


def cut_file(name, size):
    def spoil(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return spoil


def remove(name):
    return lambda folder: (folder / name).unlink()


def set_value(name, value, index=(0, 0)):
    def edit(stored):
        stored[name][index[: stored[name].ndim]] = value

    return tensors(edit)


def cast(name, dtype):
    return tensors(lambda stored: stored.update({name: stored[name].astype(dtype)}))


def other_lm_head(folder):
    edit_tensors(folder / "base", lambda stored: stored["lm_head.weight"].__iadd__(0.5))


def index_with(name):
    def spoil(folder):
        head = folder / "head"
        (head / WEIGHTS).rename(folder / "elsewhere.safetensors")
        index = {"weight_map": {MLP: name}}
        (head / (WEIGHTS + ".index.json")).write_text(json.dumps(index))

    return spoil


def header_of(text):
    """A safetensors file with this header and no values."""

    def spoil(folder):
        data = text.encode()
        (folder / "head" / WEIGHTS).write_bytes(len(data).to_bytes(8, "little") + data)

    return spoil


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


def orbax_data(folder):
    return max(
        (folder / "head" / "params").rglob("*"), key=lambda p: p.is_file() * p.stat().st_size
    )


def flip_a_byte(folder):
    path = orbax_data(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
    "NaN in the output matrix": (set_value("lm_head.weight", np.nan), "lm_head.weight differs fr"),
    "other embedding": (set_value("clover_embed_tokens.weight", 9.0, (3, 0)), "(first in row 3)"),
    "base with another lm_head": (other_lm_head, "lm_head.weight differs from the output matrix"),
    "config of a wider base": (config(hidden_size=64), "the head's hidden_size is 64, that of"),
    "config of another vocabulary": (config(vocab_size=64), "the head's vocab_size is 64, that"),
    "more vocabulary": (config(vocab_size=128), "vocab_size is 128, that of the base"),
    "more layers than tensors": (
        config(clover={"num_heads": 5, "num_layers": 3}),
        "lacks tensors layers.2.",
    ),
    "fewer layers than tensors": (
        config(clover={"num_heads": 5, "num_layers": 1}),
        "has tensors layers.1.",
    ),
    "no positions": (config(clover={"num_heads": 0, "num_layers": 2}), "clover.num_heads must be"),
    "heads that do not divide": (config(num_attention_heads=5), "must be divisible by num_att"),
    "other head count": (config(num_key_value_heads=4), "k_proj.weight has shape"),
    "not a number": (config(intermediate_size="big"), "intermediate_size must be a positive"),
    "another activation": (config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "config gone": (remove("head/config.json"), "nor config.json (others' layouts)"),
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
        "lists the shard '../elsewhere.safetensors', which is no file beside it",
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
        config(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        "eagle_aux_hidden_state_layer_ids must be 3 different layers of the base's 8, in ascending",
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
TORCH = {
    "pickle with code": (
        zipped({"archive/data.pkl": pickle.dumps(RunsCode()), "archive/version": "3\n"}),
        "pytorch_model.bin holds more or less than tensors",
    ),
    "bare pickle with code": (
        torch_archive(lambda path: path.write_bytes(pickle.dumps(RunsCode()))),
        "pytorch_model.bin is not a whole PyTorch archive",
    ),
    "zip bomb": (
        zipped({"archive/data.pkl": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED),
        "pytorch_model.bin would unpack to more than its size",
    ),
    "compressed entries": (
        zipped({"a/data.pkl": bytes(range(250))}, zipfile.ZIP_LZMA),
        "entry 'a/data.pkl' is compressed",
    ),
    "path tricks": (
        zipped({"archive/../../escaped": b"x"}),
        "entry 'archive/../../escaped' leads out of the archive",
    ),
    "absolute path": (zipped({"/escaped": b"x"}), "entry '/escaped' leads out of the archive"),
    "archive cut": (
        lambda folder: (
            zipped({"archive/data.pkl": b"x" * 500})(folder),
            cut_file("head/pytorch_model.bin", 300)(folder),
        ),
        "pytorch_model.bin is not a whole PyTorch archive",
    ),
    "archive without tensors": (zipped({"readme": b"x"}), "pytorch_model.bin holds more or less"),
}
NATIVE = {
    "card gone": (remove("head/draft.json"), "is no draft: it has neither draft.json"),
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
    "a byte flipped": (flip_a_byte, "has changed since it was written; copy it again"),
    "a file gone": (lambda folder: orbax_data(folder).unlink(), "is missing; was the draft copied"),
    "another tokenizer": (
        lambda folder: save_byte_fallback(folder / "base"),
        "tokenizer",
    ),
    "another chat template": (
        lambda folder: save_byte_level(folder / "base", CHAT_TEMPLATE + "!"),
        "was trained for another base than",
    ),
    "another lm_head": (other_lm_head, "lm_head "),
    "a base of another depth": (
        lambda folder: edit_json(
            folder / "head" / "draft.json",
            base=json.loads((folder / "head/draft.json").read_text())["base"] | {"num_layers": 9},
        ),
        "num_layers 9 against 2",
    ),
}


def assert_refused(command, folder, message):
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
def test_a_spoilt_clover2_head(command, reference, tmp_path, monkeypatch, corruption):
    spoil, message = CLOVER2[corruption]
    copy_of(reference / "clover2", tmp_path / "head")
    copy_of(reference / "base", tmp_path / "base")
    spoil(tmp_path)
    assert_refused(command, tmp_path, message)


@pytest.fixture(scope="module")
def speculators(fixtures_dir, tmp_path_factory):
    """An EAGLE-3 head as vLLM's speculators describe it, and its base."""
    reference, folder = fixtures_dir / "eagle3_reference", tmp_path_factory.mktemp("speculators")
    copy_of(reference / "base", folder / "base")
    given = {"input": reference / "eagle3", "output": folder / "head", "base": folder / "base"}
    conversion.convert(
        conversion.ConvertOptions(**{k: str(v) for k, v in given.items()}, to="speculators")
    )
    return folder


@pytest.mark.parametrize("corruption", SPECULATORS)
def test_a_spoilt_speculators_head(command, speculators, tmp_path, corruption):
    spoil, message = SPECULATORS[corruption]
    copy_of(speculators / "head", tmp_path / "head")
    copy_of(speculators / "base", tmp_path / "base")
    spoil(tmp_path)
    assert_refused(command, tmp_path, message)


@pytest.mark.parity
@pytest.mark.parametrize("corruption", TORCH)
def test_a_spoilt_archive(command, reference, tmp_path, monkeypatch, corruption):
    spoil, message = TORCH[corruption]
    copy_of(reference / "clover2", tmp_path / "head")
    copy_of(reference / "base", tmp_path / "base")
    spoil(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(command, tmp_path, message)


@pytest.mark.parametrize("corruption", NATIVE)
def test_a_spoilt_draft_directory(command, speaking, tmp_path, corruption):
    spoil, message = NATIVE[corruption]
    copy_of(speaking / "head", tmp_path / "head")
    copy_of(speaking / "base", tmp_path / "base")
    spoil(tmp_path)
    assert_refused(command, tmp_path, message)
