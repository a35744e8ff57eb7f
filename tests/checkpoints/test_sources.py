"""Sources of bases: folders, the hub, known shapes, and the base inside the package."""

import json
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import clover_jax
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.shapes import (
    SHAPES,
    base_shapes,
    random_params,
    shape_config,
    shape_notice,
)
from clover_jax.checkpoints.sources import HUB_PATTERNS, find_directory
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.errors import UserError
from experiments.tiny_base.bits_per_byte import score_documents
from tests.tiny_models import decode_all


@pytest.fixture
def hub(monkeypatch):
    """A hub that records what is asked for and fails as it does without a network."""
    asked = []
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def snapshot_download(repository, **options):
        asked.append((repository, options))
        raise LocalEntryNotFoundError("Cannot reach the hub.\nCheck your connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_offline_says_how_to_go_on(hub):
    message = (
        r"^the folder owner/name does not exist, and no repository of this name can be fetched "
        r"from the hub \(the hub cannot be reached and its cache has no copy\)$"
    )
    with pytest.raises(UserError, match=message):
        find_directory("owner/name")
    asked = {"revision": None, "allow_patterns": list(HUB_PATTERNS), "token": False}
    assert hub == [("owner/name", asked)]


def test_a_folder_is_taken_as_it_is_and_close_names_of_a_mistyped_one_are_listed(
    tmp_path, monkeypatch, hub
):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_directory("runs/mine").samefile(tmp_path / "runs" / "mine")
    for source, close in {
        "runs/mein": "runs/mine",
        "./run/mine": "runs/mine",
        f"{tmp_path}/runz/mine": f"{tmp_path}/runs/mine",
        "runs/mine/best/draft": None,
        "a/b/c": None,
    }.items():
        with pytest.raises(UserError) as error:
            find_directory(source)
        names = f" (close names: {close})" if close else ""
        assert str(error.value) == f"the folder {source} does not exist{names}"
    assert hub == []
    # This may be a repository, so both failures are reported.
    with pytest.raises(UserError, match=r"run/mine does not exist \(close names: runs/mine\), and"):
        find_directory("run/mine")
    with pytest.raises(UserError, match=r"'run' is neither a folder \(close names: runs\), nor a"):
        find_directory("run")


def test_a_hub_id_may_name_a_revision_and_a_token_comes_from_the_environment(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(UserError, match=r"owner/name@v1\.0 .*can be fetched from the hub"):
        find_directory("owner/name@v1.0")
    ((repository, options),) = hub
    assert (repository, options["revision"], options["token"]) == ("owner/name", "v1.0", "secret")


def test_a_failure_without_words_is_named_by_its_kind(hub, monkeypatch):
    def fail(repository, **options):
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"can be fetched from the hub \(TimeoutError\)"):
        find_directory("owner/name")


REPOSITORIES = {
    "base": (
        ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"],
        ["pytorch_model.bin", "original/consolidated.00.pth", "README.md"],
    ),
    "shards": (
        ["config.json", "model.safetensors-00001-of-00002.safetensors"],
        ["model.safetensors.bak"],
    ),
    "old head": (["config.json", "pytorch_model.bin"], ["training_args.bin"]),
    "draft": (["draft.json", "params/d/0", "params/ocdbt.process_0/d/1"], ["LICENSE"]),
    "workdir": (
        ["best/draft.json", "best/params/d/0", "draft/draft.json", "draft/params/manifest.ocdbt"],
        ["checkpoints/2/state/d/0", "metrics.jsonl", "tensorboard/events"],
    ),
    "medusa": (["config.json", "medusa_lm_head.pt"], []),
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_what_is_fetched_of_a_repository(monkeypatch, tmp_path, name):
    """What is read, as the hub's own filter selects it, and nothing else."""
    wanted, others = REPOSITORIES[name]

    def snapshot_download(repository, allow_patterns, **options):
        for path in filter_repo_objects(wanted + others, allow_patterns=allow_patterns):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_directory("owner/name") == tmp_path
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == sorted(wanted)


@pytest.mark.parametrize(
    "source, message",
    [
        ("builtin:huge", "unknown built-in base 'huge'; the built-in base is builtin:tiny"),
        ("builtin:../models", "unknown built-in base '../models'"),
        ("nowhere", "'nowhere' is neither a folder, nor a hub id like owner/name, nor built"),
        ("/no/such/place", "the folder /no/such/place does not exist"),
        ("../place", "the folder ../place does not exist"),
    ],
)
def test_what_is_nowhere_is_refused(source, message, hub):
    with pytest.raises(UserError, match=message):
        find_directory(source)
    assert hub == []


def test_a_file_is_refused():
    with pytest.raises(UserError, match="is a file; pass the folder that holds config.json"):
        find_directory(__file__)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8.03),  # the sizes that their model cards state
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("qwen3-30b-a3b", 30.53),
        ("gpt-oss-20b", 20.91),
        *(("gemma3-270m", 0.2681), ("gemma3-1b", 0.9999)),
        ("gemma3-27b", 27.01),  # of the text: images take 0.42 more
        *(("gemma4-31b", 30.7), ("gemma4-26b-a4b", 25.2)),
        *(("llama2-7b", 6.74), ("vicuna-7b", 6.74), ("mistral-7b", 7.25), ("qwen3-8b", 8.19)),
        *(("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.721), ("llama-100m", 0.1247)),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_model(name, parameters):
    # Layers are alike, or every sixth one is wider; tracing a hundred takes seconds.
    period = 6 if SHAPES[name].local_head_dim else 1

    def count(periods):
        shapes = base_shapes(shape_config(f"shape:{name}:{periods * period}"), jnp.bfloat16)
        return sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e9

    first, second = count(1), count(2)
    counted = first + (SHAPES[name].num_layers // period - 1) * (second - first)
    assert counted == pytest.approx(parameters, rel=0.002)


def test_a_generic_shape_has_heads_of_64_and_a_known_one_may_have_fewer_layers():
    config = shape_config("shape:192x2x100")
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (192, 2, 100)
    assert (config.num_heads, config.head_dim, config.intermediate_size) == (3, 64, 512)
    assert shape_config("shape:llama3-8b:4").num_layers == 4
    assert shape_config("shape:llama3-8b").num_layers == 32


def test_random_weights_are_the_same_again_and_in_the_dtype_asked_for():
    first = load_base("shape:64x1x32", jnp.bfloat16)
    again = load_base("shape:64x1x32", jnp.bfloat16)
    jax.tree.map(lambda a, b: (a == b).all() or pytest.fail("differs"), first.params, again.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(first.params)} == {jnp.dtype(jnp.bfloat16)}
    other = random_params(base_shapes(first.config, jnp.bfloat16), seed=1)
    assert (other["lm_head"] != first.lm_head).any()
    assert (first.params["final_norm"]["scale"] == 1).all()


def test_a_shape_decodes_and_every_leaf_can_be_placed_by_the_caller():
    placed = []
    base = load_base("shape:64x1x32", place=lambda path, leaf: placed.append(path) or leaf)
    assert ("layers_0", "attention", "qkv") in placed
    assert len(placed) == 9
    engine = Engine(base.config, None, TreeConfig.root_only())
    (row,) = decode_all(engine, base.params, None, [[1, 2, 3]], 5)
    assert len(row.output_ids) == 5


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("shape:gpt5", "'shape:gpt5' is unknown; the shapes are llama3-8b, .*shape:512x8x8192"),
        ("shape:llama3-8b:few", "shape:llama3-8b:few' is unknown"),
        ("shape:100x2x32", r"the width \(100\) must be a multiple of 64"),
        ("shape:0x2x32", r"the width \(0\) must be a multiple of 64, .* at least 1"),
    ],
)
def test_an_impossible_shape_is_a_user_s_mistake(source, said):
    with pytest.raises(UserError, match=said):
        load_base(source)


def test_only_shapes_carry_a_notice():
    assert shape_notice("builtin:tiny") is None
    assert "shape:llama2-7b has random weights" in shape_notice("shape:llama2-7b")


FOLDER = Path(clover_jax.__file__).parent / "assets" / "tiny"

# Written for this test, so that no corpus holds it.
UNSEEN = '''\
class Basket:
    """Fruit by kind, each kind with how many there are."""

    def __init__(self):
        self.counts = {}

    def add(self, kind, number=1):
        """Add some fruit of one kind."""
        if number < 0:
            raise ValueError("number must not be negative")
        self.counts[kind] = self.counts.get(kind, 0) + number

    def remove(self, kind):
        """Remove all fruit of one kind and return how many there were."""
        if kind not in self.counts:
            raise KeyError(kind)
        return self.counts.pop(kind)

    def __len__(self):
        return sum(self.counts.values())
'''


def test_weights_are_within_the_limits_and_predict_python_they_have_not_seen():
    sizes = [path.stat().st_size for path in FOLDER.glob("*.safetensors")]
    assert max(sizes) <= 15_000_000
    assert sum(sizes) <= 24_000_000
    base = load_base("builtin:tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(FOLDER))
    tokens = np.array(tokenizer(UNSEEN, add_special_tokens=False)["input_ids"])
    score = score_documents(
        base.config, base.params, [tokens], len(UNSEEN), bos=tokenizer.bos_token_id, length=256
    )
    assert score.bits_per_byte < 1.5


def test_prompts_are_varied_and_the_card_names_command_and_figures():
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    assert len(prompts) == len(set(prompts)) == 200
    assert {row["category"] for row in rows} == {"function", "method", "test"}
    assert all(prompt.endswith((":", '"""', "'''")) for prompt in prompts)
    card = (FOLDER / "README.md").read_text()
    assert "python -m experiments.tiny_base.pretrain" in card
    assert "| bits per byte, held-out modules |" in card
