"""`--tree=auto` from prompts to rows, with the machine's costs given."""

import dataclasses
import json

import numpy as np
import pytest

from clover_jax import cli, evaluate, generate
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.drafters import registry
from clover_jax.tree_search import auto_tree
from clover_jax.tree_search.tree_choice import CostTable
from clover_jax.tree_search.tree_trial import Trial
from tests.tiny_folders import save_tiny_base, save_tiny_draft
from tests.tiny_models import TINY, random_models

CHEAP = CostTable(1.0, ((1, 1.0), (8, 1.0), (128, 20.0)), 0.0, ((1, 0.0), (8, 0.0)), 0.0)
DEAR = CostTable(1.0, ((1, 1.0), (128, 1.0)), 99.0, ((1, 0.0),), 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    base = save_tiny_base(root / "base")
    return base, save_tiny_draft(root / "draft", base)


def trials(gain):
    """Return a trial in which every tree is that much faster than plain decoding."""
    return lambda ways, *_: (
        [Trial((1.0, 2.0), 1.0)] + [Trial((gain, 2 * gain), 2.0)] * (len(ways) - 1)
    )


@pytest.fixture
def decode(folders, tmp_path, monkeypatch, capsys):
    """Decode with given costs: (rows, stderr)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto_tree, "NEW_TOKENS", 16)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_ids": [5, 6, 7, 8]}) + "\n")

    def run(costs, name, *argv, gain=None):
        monkeypatch.setattr(auto_tree, "measure_costs", lambda *_: costs)
        if gain is not None:
            monkeypatch.setattr(auto_tree, "measure_trials", trials(gain))
        base, draft = folders
        output = tmp_path / name
        argv = (f"--draft={draft}", f"--calibration={prompts}", *argv) if costs else argv
        common = (f"--base={base}", f"--prompts={prompts}", f"--output={output}")
        status = cli.run(
            generate.main, generate.define_flags, [*common, "--max_new_tokens=12", *argv]
        )
        assert status == 0
        return [json.loads(line) for line in output.read_text().splitlines()], capsys.readouterr()

    return run


def test_the_tree_that_pays_is_used_and_explained(decode):
    plain, _ = decode(None, "plain.jsonl")
    rows, printed = decode(CHEAP, "auto.jsonl", "--tree=auto", gain=1.5)
    assert "1.50 x plain decoding (1.50 to 1.50) is expected" in printed.err
    assert [row["output_ids"] for row in rows] == [row["output_ids"] for row in plain]
    assert rows[0]["tau"] > 1


@pytest.mark.parametrize("gains", [(1.5, 0.5), (0.5, 1.5)])
def test_rows_that_were_begun_go_on_with_their_tree(decode, tmp_path, gains):
    argv = ("--tree=auto", "--max_new_tokens=12")
    rows, _ = decode(CHEAP, "begun.jsonl", *argv, gain=gains[0])
    (tmp_path / "begun.jsonl").write_bytes(b'{"index": 0, "pro')  # stopped while it wrote
    again, printed = decode(CHEAP, "begun.jsonl", *argv, gain=gains[1])
    assert "begun.jsonl was begun with the tree " in printed.err
    assert again[0]["accepted"] == rows[0]["accepted"]
    assert (again[0]["tau"] > 1) == (gains[0] > 1)


def test_a_base_without_a_tokenizer_is_measured_on_given_ids(folders, tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    for path in folders[0].iterdir():
        if "token" not in path.name:
            (base / path.name).symlink_to(path)
    (tmp_path / "ids.jsonl").write_text(json.dumps({"prompt_ids": [5, 6]}) + "\n")
    argv = [f"--base={base}", f"--draft={folders[1]}", "--tree=auto", "--allow_base_mismatch"]
    argv.append(f"--prompts={tmp_path / 'ids.jsonl'}")
    assert cli.run(generate.main, generate.define_flags, argv) == 2
    assert "give rows of prompt_ids with --calibration=FILE" in capsys.readouterr().err


def test_where_none_comes_near_paying_nothing_is_tried(decode):
    rows, printed = decode(DEAR, "none.jsonl", "--tree=auto")
    assert "a plain step takes 1000.00 ms" in printed.err
    assert "no tree comes near paying: plain decoding" in printed.err
    assert rows[0]["tau"] == 1


def test_where_the_trial_denies_what_the_parts_promised_decoding_is_plain(decode):
    rows, printed = decode(CHEAP, "denied.jsonl", "--tree=auto", gain=0.5)
    assert "no tree pays, or not in every round: plain decoding" in printed.err
    assert rows[0]["tau"] == 1


def test_a_trial_decodes_in_every_way_and_is_remembered(decode, monkeypatch):
    _, first = decode(CHEAP, "first.jsonl", "--tree=auto")
    monkeypatch.setattr(auto_tree, "measure_trials", None)
    _, again = decode(CHEAP, "again.jsonl", "--tree=auto")
    assert "by trial, in 5 rounds" in first.err
    tried = [line for line in first.err.splitlines() if "x plain decoding (" in line]
    assert len(tried) >= 3
    assert [line for line in again.err.splitlines() if "x plain decoding (" in line] == tried


def test_sampled_children_are_tried_with_trees_that_leave_out_no_draw(decode, monkeypatch):
    ranks = np.array([[0], [2], [0]])
    monkeypatch.setattr(auto_tree, "ranked_depth", lambda head: 1)
    monkeypatch.setattr(auto_tree, "measure_ranks", lambda *_, **__: ranks)
    argv = ("--tree=auto", "--temperature=1", "--draft_sampling=sampled")
    _, printed = decode(CHEAP, "sampled.jsonl", *argv, gain=0.5)
    assert "3 nodes, 3 by level: tau" in printed.err


def test_costs_that_were_measured_with_another_attention_are_not_used(monkeypatch):
    keys = []

    def remembered(name, key, measure):
        keys.append(key)
        return CHEAP.to_dict()

    monkeypatch.setattr(auto_tree, "remembered", remembered)
    head = registry.head(registry.config_for_base("lookup", TINY))
    models = random_models(head, {}, parse_tree("copy:4"))
    for attention in ("xla", "pallas"):
        auto_tree._costs(dataclasses.replace(models, attention=attention), 1)
    assert keys[0] != keys[1]


def test_prompts_that_are_all_too_long_to_measure_with_are_an_error(folders, tmp_path, capsys):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt_ids": [5] * 100}) + "\n")
    argv = [f"--base={folders[0]}", f"--draft={folders[1]}", "--tree=auto", "--prompt=a"]
    argv.append(f"--calibration={tmp_path / 'long.jsonl'}")
    assert cli.run(generate.main, generate.define_flags, argv) == 2
    assert "every prompt to measure with has more than 64 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "depth"), [("eagle", 6), ("clover", 3), ("clover2", 6)])
def test_a_head_that_drafts_on_by_itself_is_looked_at_deeper_than_it_was_trained(kind, depth):
    assert auto_tree.ranked_depth(registry.config_for_base(kind, TINY)) == depth


def test_calibration_prompts_need_the_automatic_tree(folders, capsys):
    argv = [f"--base={folders[0]}", "--calibration=x", "--tree=paper25", "--prompt=a"]
    assert cli.run(generate.main, generate.define_flags, argv) == 2
    assert "--calibration=x is for --tree=auto; add that" in capsys.readouterr().err


@pytest.mark.parametrize("command", [generate, evaluate])
def test_the_automatic_tree_takes_no_number_of_copies(folders, command, capsys):
    draft = "--draft" if command is generate else "--drafts"
    argv = [f"--base={folders[0]}", f"{draft}={folders[1]}", "--tree=auto", "--copy=3"]
    assert cli.run(command.main, command.define_flags, argv) == 2
    error = capsys.readouterr().err
    assert "--copy=3: " in error
    assert "tries copies itself" in error
