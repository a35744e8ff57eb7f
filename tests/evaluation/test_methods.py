"""The models that evaluate measures: the automatic tree among them, the race's result given."""

import dataclasses
import json

import pytest

from clover_jax.data.prompts import BadPrompt
from clover_jax.decoding import race
from clover_jax.decoding.models import TREES, Models, identity_of
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.evaluation.options import VANILLA, Options
from clover_jax.evaluation.plan import choose_baselines, load_methods, sizes_on
from clover_jax.evaluation.run import make_plan
from clover_jax.models.meshes import MeshShape, make_abstract_mesh
from clover_jax.runtime.row_writer import manifest_path
from tests.tiny_folders import save_tiny_base, save_tiny_draft


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    base = save_tiny_base(root / "base")
    (base / "prompts.jsonl").write_text(json.dumps({"prompt_ids": [5, 6, 7, 8]}) + "\n")
    draft = save_tiny_draft(root / "draft", base)
    return Options(
        ModelSpec(str(base), dtype="float32"),
        seed=0,
        workdir=root / "out",
        drafts=f"a={draft},b={draft}",
        tree="a=auto,b=chain:1",
        baselines="none",
        batch_size=2,
        repeats=1,
    )


@pytest.fixture
def load(options, monkeypatch):
    """Load what is measured where a race of trees ends with this one."""

    def run(tree, options=options):
        choice = race.Choice(tree, {tree: 15.0, "plain": 10.0}, None)
        monkeypatch.setattr(race, "fastest_tree", lambda *_: choice)
        return load_methods(options, GenerationSettings())

    return run


def test_a_draft_gets_the_tree_that_pays(load, capsys):
    methods = load("chain:3")
    assert [method.name for method in methods] == [VANILLA, "a", "b"]
    assert [method.models.tree.name for method in methods[1:]] == ["chain:3", "chain:1"]
    assert "tree: chain:3 (15.0 tokens/s; plain 10.0)" in capsys.readouterr().err


@pytest.mark.parametrize("tree", ["paths:0/1/0.0", "dynamic:5:3:2"])
def test_rows_that_were_begun_go_on_with_their_tree(load, options, tree, tmp_path):
    begun = dataclasses.replace(options, output=str(tmp_path))
    path = begun.rows_path("a")
    path.parent.mkdir()
    path.write_text('{"index": 0}\n')
    manifest_path(path).write_text(json.dumps({"settings": {"tree": tree}}))
    assert load("chain:3", begun)[1].models.tree == parse_tree(tree)


def test_a_tree_of_a_file_is_known_by_its_paths(load, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1]]")
    models = load(f"file:{tmp_path / 'tree.json'}")[1].models
    identity = identity_of(models)
    assert identity["tree"].startswith("paths:0/")
    named = dataclasses.replace(models, tree=parse_tree(identity["tree"]))
    assert identity_of(named) == identity


def test_a_draft_that_does_not_pay_is_measured_all_the_same(load, capsys):
    chosen = load("plain")[1].models
    assert chosen.draft is not None
    assert chosen.tree.num_nodes > 0
    assert f"a is measured with {chosen.tree.name} nevertheless" in capsys.readouterr().err


def test_every_method_has_the_chat_template_that_is_given(options):
    spec = dataclasses.replace(options.spec, chat_template="vicuna")
    chosen = dataclasses.replace(options, tree="chain:1", spec=spec)
    methods = load_methods(chosen, GenerationSettings())
    assert all("USER: " in method.models.tokenizer.chat_template for method in methods)


def test_batch_sizes_are_those_that_a_mesh_decodes(options):
    mesh = make_abstract_mesh(MeshShape(data=2))
    assert sizes_on(mesh, [1, 2, 3]) == [2, 4]
    assert sizes_on(None, [1, 2, 3]) == [1, 2, 3]
    asked = dataclasses.replace(options, batch_size=1, batch_sizes="1,2,3")
    models = Models(base=None, tokenizer=None, draft=None, tree=TreeConfig.root_only(), mesh=mesh)
    prompts = [BadPrompt(0, "a.jsonl:1", "bad")]
    plan = make_plan(asked, GenerationSettings(), models, prompts)
    assert plan.batch_sizes == [2, 4]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, list(TRAINING_FREE)),
        ({"baselines": "none"}, []),
        ({"baselines": "lookup, lookup"}, ["lookup"]),
        ({"baselines": "lookup", "drafts": "mine=lookup"}, []),
        ({"baselines": "lookup", "drafts": "lookup=runs/a"}, []),
    ],
)
def test_baselines_are_all_that_need_no_training_unless_named_or_given(options, given, names):
    asked = dataclasses.replace(options, **{"baselines": None, **given}, tree=None)
    assert [one.name for one in choose_baselines(asked, GenerationSettings())] == names


def test_baselines_are_left_out_where_drafted_tokens_are_drawn_unless_named(options):
    drawn = GenerationSettings(temperature=1.0, draft_sampling="sampled")
    unasked = dataclasses.replace(options, baselines=None)
    assert choose_baselines(unasked, drawn) == []
    asked = dataclasses.replace(options, baselines="lookup")
    assert [one.name for one in choose_baselines(asked, drawn)] == ["lookup"]
    wrong = dataclasses.replace(options, baselines="lookup,eagle")
    with pytest.raises(UserError, match="--baselines: 'eagle' is not a training-free draft"):
        choose_baselines(wrong, drawn)


def test_trees_and_copies_of_the_drafts_are_not_those_of_baselines(options):
    spec = dataclasses.replace(options.spec, copy=2)
    chosen = dataclasses.replace(options, baselines="lookup", tree="chain:1", spec=spec)
    methods = load_methods(chosen, GenerationSettings())
    trees = {method.name: method.models.tree.name for method in methods}
    assert trees == {VANILLA: "none", "a": "chain:1+copy:2", "b": "chain:1+copy:2"} | {
        "lookup": TREES["lookup"]
    }
