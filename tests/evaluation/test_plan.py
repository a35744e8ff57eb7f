"""The flags of `evaluate`, its tasks, methods and timed passes: speed-ups within a repeat."""

import dataclasses
import json
from pathlib import Path

import pytest

from clover_jax import evaluate
from clover_jax.data.prompts import BadPrompt, parse_prompt
from clover_jax.decoding import race
from clover_jax.decoding.models import Models, identity_of
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.evaluation.options import VANILLA, DraftChoice, Options, parse_drafts
from clover_jax.evaluation.plan import (
    JOURNAL,
    PassJournal,
    PassKey,
    TimedPass,
    choose_baselines,
    group_by_task,
    load_methods,
    sizes_on,
    speed,
    split_rounds,
    throughputs,
)
from clover_jax.evaluation.run import make_plan
from clover_jax.models.meshes import MeshShape, make_abstract_mesh
from clover_jax.runtime.row_writer import manifest_path
from tests.conftest import run_command
from tests.tiny_folders import save_tiny_base, save_tiny_draft

MT_BENCH = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"]


def chosen(**given):
    return Options(ModelSpec("b"), seed=0, workdir=Path("o"), batch_size=4, **given)


def test_the_drafts_of_the_example():
    choices = parse_drafts("a=x,b=y", "b=chain:4")
    assert choices == [DraftChoice("a", "x", None), DraftChoice("b", "y", "chain:4")]


def test_one_tree_is_for_all_and_a_draft_without_a_name_takes_its_folder_s():
    assert [choice.tree for choice in parse_drafts("a=x, b=y", "paper25")] == ["paper25"] * 2
    assert parse_drafts("", None) == []
    choices = parse_drafts("runs/eagle,b=runs/eagle", None)
    assert [(c.name, c.source) for c in choices] == [("eagle", "runs/eagle"), ("b", "runs/eagle")]
    # The same draft may be measured with several trees.
    small, large = parse_drafts("small=x,large=x", "small=chain:4,large=paper25")
    assert small == DraftChoice("small", "x", "chain:4")
    assert large == DraftChoice("large", "x", "paper25")


@pytest.mark.parametrize(
    ("drafts", "tree", "said"),
    [
        ("a,b/a", None, "the name 'a' is given twice"),
        ("out/<a>", None, "'out/<a>' should be NAME=DIR or DIR"),
        ("a=", None, "'a=' should be NAME=DIR"),
        ("a/b=x", None, "'a/b=x' should be NAME=DIR"),
        ("vanilla=x", None, "the name 'vanilla' stands for plain decoding"),
        ("a=x,a=y", None, "the name 'a' is given twice"),
        ("a=x,b=y", "c=chain:4", "'c=chain:4' should be NAME=TREE; the drafts are a, b"),
    ],
)
def test_what_cannot_be_read_is_named(drafts, tree, said):
    with pytest.raises(UserError, match=said):
        parse_drafts(drafts, tree)


def test_the_first_batch_size_is_that_of_the_report():
    assert chosen(batch_sizes="1,4,8").all_batch_sizes == [4, 1, 8]
    assert chosen().all_batch_sizes == [4]
    with pytest.raises(UserError, match="--batch_sizes=1,x: 'x' is not a batch size"):
        chosen(batch_sizes="1,x")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare=a"], "--compare=a: expected two reports, A,B"),
        (["--compare=/nowhere/a.json,b"], "/nowhere/a.json cannot be read"),
        (["--drafts=x="], "'x=' should be NAME=DIR or DIR"),
        (["--prompts=/nowhere.jsonl"], "/nowhere.jsonl: No such file or directory"),
        (["--mesh=data=2"], "--mesh=data=2 asks for 2 devices, but 1 is here"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, said, capsys):
    status, lines, error = run_command(capsys, evaluate, *argv)
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert said in error


def rows(*categories):
    return [
        parse_prompt({"prompt": "a", "category": category}, index, f"f:{index}")
        for index, category in enumerate(categories)
    ]


def shape(tasks):
    return {task: [prompt.index for prompt in prompts] for task, prompts in tasks.items()}


def test_tasks_and_rows_keep_their_order_and_a_limit_holds_for_each_task():
    assert shape(group_by_task(rows("b", "a", "b"))) == {"b": [0, 2], "a": [1]}
    assert shape(group_by_task(rows("a", "a", "b", "a"), limit=2)) == {"a": [0, 1], "b": [2]}


def test_rows_without_a_category_are_named_after_their_file():
    prompts = [parse_prompt({"prompt": "a"}, 0, "dir/HumanEval.jsonl.gz:1")]
    prompts += [BadPrompt(1, "dir/HumanEval.jsonl.gz:2", "bad")]
    prompts += [parse_prompt({"prompt": "a"}, 2, "chats.jsonl:1")]
    assert shape(group_by_task(prompts)) == {"HumanEval": [0, 1], "chats": [2]}


def test_mt_bench_is_one_task_only_beside_others():
    all_eight = [*MT_BENCH, "humanities"]
    assert list(group_by_task(rows(*all_eight))) == all_eight
    mixed = group_by_task(rows(*all_eight, "qa"))
    assert shape(mixed) == {"mt_bench": list(range(8)), "qa": [8]}
    assert list(group_by_task(rows("math", "qa"))) == ["math", "qa"]


HERE = {"mesh": None, "hardware": {"device": "cpu", "num_devices": 1}}


def timed(method="a", repeat=0, tokens=100, seconds=2.0, task="qa", session=0):
    key = PassKey(4, task, repeat, method)
    return TimedPass(*key, 10, tokens, seconds, 0.0, [], session, HERE, None)


def test_throughput_is_all_tokens_over_all_seconds():
    # Not the mean of 50 and 200.
    passes = [timed(tokens=100, seconds=2.0), timed(tokens=200, seconds=1.0, task="rag")]
    assert throughputs(passes) == {0: 100.0}
    assert throughputs([timed(tokens=0, seconds=0.0)]) == {}, "a pass without time has none"


def test_speed_up_is_the_median_of_the_ratios_within_repeats():
    plain = [timed("vanilla", repeat, seconds=s) for repeat, s in enumerate([2.0, 4.0, 1.0])]
    drafted = [timed("a", repeat, seconds=s) for repeat, s in enumerate([1.0, 1.0, 1.0])]
    found = speed(drafted, plain)["speedup"]
    assert (found["median"], found["least"], found["most"]) == (2.0, 1.0, 4.0)
    assert found["repeats"] == (2.0, 4.0, 1.0)
    assert speed([], plain)["speedup"] is None
    assert speed([timed()], [])["tokens_per_second"]["median"] == pytest.approx(50)


def test_the_journal_survives_a_torn_line(tmp_path):
    journal = PassJournal(tmp_path, HERE, overwrite=False)
    assert journal.origin["session"] == 0
    journal.add(timed())
    assert list(json.loads((tmp_path / JOURNAL).read_text())) == [
        *("batch_size", "task", "repeat", "method", "rows", "tokens", "seconds"),
        *("compile_seconds", "changed", "session", "conditions", "revision"),
    ]
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"batch_size": 4, "ta')
    again = PassJournal(tmp_path, HERE, overwrite=False)
    assert again.origin["session"] == 1
    assert timed().key in again
    assert timed(repeat=1).key not in again
    again.add(timed(repeat=1))
    both = PassJournal(tmp_path, HERE, overwrite=False).select(method="a")
    assert both == [timed(), timed(repeat=1)]
    assert PassJournal(tmp_path, HERE, overwrite=True).select() == []


def test_passes_of_other_conditions_are_measured_again(tmp_path):
    PassJournal(tmp_path, HERE, overwrite=False).add(timed())
    elsewhere = HERE | {"mesh": "data=2"}
    there = PassJournal(tmp_path, elsewhere, overwrite=False)
    assert timed().key not in there
    assert there.num_dropped == 1
    assert timed().key not in PassJournal(tmp_path, HERE, overwrite=False)  # and are gone


def test_rounds_that_a_stop_has_split_are_listed():
    passes = [timed("vanilla"), timed("a"), timed("vanilla", 1), timed("a", 1, session=1)]
    assert split_rounds(passes) == [{"batch_size": 4, "task": "qa", "repeat": 1}]
    assert split_rounds(dataclasses.replace(one, session=3) for one in passes) == []


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    base = save_tiny_base(root / "base")
    (base / "prompts.jsonl").write_text(json.dumps({"prompt_ids": [5, 6, 7, 8]}) + "\n")
    draft = save_tiny_draft(root / "draft", base)
    spec, drafts = ModelSpec(str(base), dtype="float32"), f"a={draft},b={draft}"
    chosen = {"drafts": drafts, "tree": "a=auto,b=chain:1", "baselines": "none"}
    return Options(spec, seed=0, workdir=root / "out", batch_size=2, repeats=1, **chosen)


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
    # A draft that does not pay is measured nevertheless.
    chosen = load("plain")[1].models
    assert chosen.draft is not None
    assert chosen.tree.num_nodes > 0
    assert f"a is measured with {chosen.tree.name} nevertheless" in capsys.readouterr().err


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
    trees = [(method.name, method.models.tree.name) for method in methods]
    drafts = [("a", "chain:1+copy:2"), ("b", "chain:1+copy:2")]
    assert sorted(trees) == sorted([(VANILLA, "none"), ("lookup", "copy:25"), *drafts])
