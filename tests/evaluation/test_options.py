"""Which drafts, trees and batch sizes the flags ask for, and mistakes in them."""

from pathlib import Path

import pytest

from clover_jax import cli, evaluate
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.evaluation.options import DraftChoice, Options, parse_drafts


def options(**given):
    return Options(ModelSpec("b"), seed=0, workdir=Path("o"), batch_size=4, **given)


def test_the_drafts_of_the_example():
    choices = parse_drafts("a=x,b=y", "b=chain:4")
    assert choices == [DraftChoice("a", "x", None), DraftChoice("b", "y", "chain:4")]


def test_one_tree_is_for_all_and_no_drafts_are_allowed():
    assert [choice.tree for choice in parse_drafts("a=x, b=y", "paper25")] == ["paper25"] * 2
    assert parse_drafts("", None) == []


def test_a_draft_without_a_name_takes_its_folder_s():
    choices = parse_drafts("runs/eagle,b=runs/eagle", None)
    assert [(c.name, c.source) for c in choices] == [("eagle", "runs/eagle"), ("b", "runs/eagle")]


def test_the_same_draft_is_measured_with_several_trees():
    choices = parse_drafts("small=x,large=x", "small=chain:4,large=paper25")
    assert [(c.name, c.source, c.tree) for c in choices] == [
        ("small", "x", "chain:4"),
        ("large", "x", "paper25"),
    ]


@pytest.mark.parametrize(
    ("drafts", "tree", "said"),
    [
        ("a,b/a", None, "the name 'a' is given twice"),
        ("out/<a>", None, "'out/<a>' should be NAME=DIR, or DIR"),
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
    assert options(batch_sizes="1,4,8").all_batch_sizes == [4, 1, 8]
    assert options().all_batch_sizes == [4]
    with pytest.raises(UserError, match="--batch_sizes=1,x: 'x' is not a batch size"):
        options(batch_sizes="1,x")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare=a"], "--compare=a: expected two reports, A,B"),
        (["--compare=/nowhere/a.json,b"], "/nowhere/a.json cannot be read"),
        (["--drafts=x="], "'x=' should be NAME=DIR, or DIR"),
        (["--prompts=/nowhere.jsonl"], "/nowhere.jsonl: No such file or directory"),
        (["--mesh=data=2"], "--mesh=data=2 asks for 2 devices, but 1 is here"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, said, capsys):
    assert cli.run(evaluate.main, evaluate.define_flags, argv) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
