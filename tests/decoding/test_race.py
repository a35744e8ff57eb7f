"""`--tree=auto`: the race's rules with a given clock, and its choice from prompts to rows."""

import dataclasses
import json

import numpy as np
import pytest

from clover_jax import evaluate, generate
from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding import race as module
from clover_jax.decoding.models import load, load_shapes
from clover_jax.decoding.race import (
    Choice,
    Turn,
    candidates,
    fastest_tree,
    race,
    winner,
    with_fastest_tree,
)
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from tests.conftest import rows_in, run_command
from tests.tiny_folders import save_tiny_draft

PROMPTS = [[5, 6, 7, 8], [9, 10], [3] * 120]  # the last longer than the context has room for
SAMPLED = SamplingConfig("lossless", "sampled")
COLD = GenerationSettings()


def turns_at(rates, tokens=12):
    """Return turns of as many tokens at each of these rates."""
    return [Turn(tokens, tokens / each) for each in rates]


class Clock:
    """Time that passes only in a decoding pass."""

    def __init__(self, order=None):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def decoding(self, name, *rates):
        """Return a pass of 12 tokens at these rates, turn by turn."""

        def run(turn):
            self.order.append(f"{name}{turn}")
            self.now += 12 / rates[turn]
            return 12

        return run


def test_the_first_of_a_turn_rotates_and_every_turn_is_timed():
    clock, ends = Clock(), []
    passes = {"plain": clock.decoding("p", 2, 3, 4), "a": clock.decoding("a", 2, 4, 3)}
    decoded = race(passes, 3, clock, lambda: ends.append(len(clock.order)))
    assert decoded == {"plain": turns_at([2, 3, 4]), "a": turns_at([2, 4, 3])}
    assert " ".join(clock.order) == "p0 a0 a1 p1 p2 a2"
    assert ends == [2, 4, 6]


def test_what_is_far_behind_leaves_the_race_but_for_plain_decoding():
    clock = Clock()
    rates = {"plain": (1, 1, 1, 1), "slow": (2, 2, 9, 9), "fast": (6, 6, 6, 6)}
    # One bad turn says little: another prompt may be this tree's.
    rates |= {"late": (2, 12, 12, 12), "early": (12, 6, 1.5, 6)}
    passes = {name: clock.decoding(name[0], *each) for name, each in rates.items()}
    turns = {name: len(own) for name, own in race(passes, 4, clock).items()}
    assert turns == {"plain": 4, "slow": 2, "fast": 4, "late": 2, "early": 3}


@pytest.mark.parametrize(
    ("rates", "name"),
    [
        ({"plain": [10, 10, 10], "a": [14, 14, 9], "b": [14, 9, 9]}, "a"),
        ({"plain": [10, 10, 10], "a": [11, 11, 11], "b": [12, 12, 12]}, "b"),
        ({"plain": [10, 10, 10], "a": [9, 9, 9]}, "plain"),
        ({"plain": [10, 1, 10], "a": [9, 9, 9]}, "plain"),
        # A slow moment that hits both in one turn changes nothing.
        ({"plain": [10, 2, 10], "a": [15, 3, 15]}, "a"),
        # What counts is the time of all turns, not how many were won.
        ({"plain": [10, 10, 10, 10, 10], "a": [9, 9, 20, 20, 20]}, "a"),
        ({"plain": [10, 10, 10, 10, 10], "a": [11, 11, 11, 11, 5]}, "plain"),
        # Left early, so its other turns are not known.
        ({"plain": [10, 10, 10], "a": [30, 30]}, "plain"),
        ({"plain": [10, 10]}, "plain"),
    ],
)
def test_a_tree_wins_only_where_it_is_faster_whichever_turn_is_left_out(rates, name):
    assert winner({way: turns_at(own) for way, own in rates.items()}) == name


def test_a_turn_of_more_tokens_counts_more():
    plain = [*turns_at([10, 10]), *turns_at([10, 10], tokens=1200)]
    assert winner({"plain": plain, "a": [*turns_at([5, 5]), *turns_at([11, 11], 1200)]}) == "a"


def small(name):
    return "chain:2", name, f"{name}+copy:4"


def models_of(kind, tree):
    spec = ModelSpec("shape:64x1x96", draft=kind, tree=tree, dtype="float32")
    return load_shapes(spec)


@pytest.mark.parametrize(
    ("kind", "tree", "sampling", "names"),
    [
        ("lookup", None, GREEDY, ["copy:2", "copy:4", "copy:8", "copy:25"]),
        ("lookup", "copy:8", GREEDY, ["copy:2", "copy:4", "copy:8"]),
        ("random:clover2", None, GREEDY, [*small("dynamic:5:4:2"), "paper25"]),
        ("random:clover", None, GREEDY, [*small("dynamic:5:3:2"), "clover4"]),
        ("random:clover2", None, SAMPLED, ["chain:2", "paths:0/1/0.0/0.1/0.0.0", "paper25"]),
        ("random:clover2", "dynamic:8", SAMPLED, ["chain:2", "paths:0/1/0.0/0.1/0.0.0"]),
        ("random:medusa:num_positions=1", None, GREEDY, ["chain:1", "clover4"]),
    ],
)
def test_plain_decoding_small_trees_and_the_draft_s_own_enter_the_race(kind, tree, sampling, names):
    ways = candidates(models_of(kind, tree), sampling)
    assert list(ways) == ["plain", *names]
    assert ways["plain"].draft is None


def test_a_draft_that_no_tree_suits_is_an_error():
    with pytest.raises(UserError, match="tree 'copy:25' has copies"):
        candidates(models_of("lookup", None), SAMPLED)


def test_a_choice_is_told_in_one_line(tmp_path):
    rates = {"plain": 21.6, "copy:4": 28.14, "paper25": 11.7}
    assert str(Choice("copy:4", rates, tmp_path)) == (
        f"tree: copy:4 (28.1 tokens/s; plain 21.6, paper25 11.7), remembered in {tmp_path}"
    )
    line = str(Choice("plain", rates, None))
    assert line.startswith("tree: none, plain decoding (21.6 tokens/s; copy:4 28.1, ")
    assert line.endswith(", not remembered")


@pytest.fixture
def draft(base, tmp_path, monkeypatch):
    """A draft in a folder of its own, with a cache folder next to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny_draft(tmp_path / "draft", base)


@pytest.fixture
def rates(monkeypatch):
    """Race without decoding; every tree is as many times as fast as plain decoding."""
    raced = []

    def use(gain):
        def result(passes, turns, *_):
            raced.append(list(passes))
            gains = {name: 1.0 if name == "plain" else gain for name in passes}
            return {name: turns_at([10 * each] * turns) for name, each in gains.items()}

        monkeypatch.setattr(module, "_passes", lambda ways, *_: ways)
        monkeypatch.setattr(module, "race", result)
        return raced

    return use


def open_models(base, draft, **fields):
    return load(ModelSpec(str(base), draft=str(draft), dtype="float32", **fields))


def test_a_choice_is_remembered_next_to_the_head_for_runs_that_are_alike(base, draft, rates):
    raced, models = rates(1.5), open_models(base, draft)
    choice = fastest_tree(models, PROMPTS, 2, COLD)
    assert (choice.name, choice.path) == ("chain:2", draft / "trees.json")
    assert choice.rates["plain"] == 10
    assert fastest_tree(models, PROMPTS[:1], 2, COLD) == choice
    assert len(raced) == 1

    # What another batch size, length, temperature, rule or program decodes fastest may differ.
    warm = GenerationSettings(temperature=0.7, draft_sampling="topk")
    fastest_tree(models, PROMPTS, 3, COLD)
    fastest_tree(models, PROMPTS, 2, dataclasses.replace(COLD, max_new_tokens=8))
    fastest_tree(models, PROMPTS, 2, dataclasses.replace(COLD, ignore_eos=True))
    fastest_tree(models, PROMPTS, 2, warm)
    fastest_tree(models, PROMPTS, 2, dataclasses.replace(warm, draft_sampling="sampled"))
    fastest_tree(dataclasses.replace(models, attention="pallas"), PROMPTS, 2, COLD)
    assert len(raced) == 7
    fastest_tree(models, PROMPTS, 2, dataclasses.replace(warm, temperature=1.0))
    fastest_tree(models, PROMPTS, 2, dataclasses.replace(COLD, max_new_tokens=1000))
    assert fastest_tree(models, PROMPTS, 2, COLD) == choice
    assert len(raced) == 7


@pytest.mark.parametrize("text", ["{", "[]", '{"choices": 3}', '{"choices": [3, {"key": 1}]}'])
def test_a_file_that_cannot_be_read_is_measured_again(base, draft, rates, text, capsys):
    raced = rates(1.5)
    (draft / "trees.json").write_text(text)
    models = open_models(base, draft)
    assert fastest_tree(models, PROMPTS, 1, COLD) == fastest_tree(models, PROMPTS, 1, COLD)
    assert len(raced) == 1
    assert (
        capsys.readouterr().err.count(f"{draft}/trees.json is not read and will be written ag") == 1
    )


def test_what_cannot_be_written_next_to_a_head_is_kept_in_the_cache_folder(
    base, draft, rates, tmp_path
):
    raced, kept = rates(1.5), tmp_path / "cache" / "clover_jax" / "trees.json"
    (draft / "trees.json").mkdir()  # no file can take its place
    for name in (draft, "lookup"):
        models = open_models(base, name)
        choice = fastest_tree(models, PROMPTS, 1, COLD)
        assert choice.path == kept
        assert fastest_tree(models, PROMPTS, 1, COLD) == choice
    assert len(raced) == 2
    kept.unlink()
    kept.mkdir()
    assert fastest_tree(models, PROMPTS, 1, COLD).path is None


def test_where_no_tree_pays_the_draft_is_left_out_and_without_prompts_keeps_its_tree(
    base, draft, rates
):
    rates(0.9)
    choice = fastest_tree(open_models(base, draft), PROMPTS, 1, COLD)
    assert choice.name == "plain"
    assert choice.apply(open_models(base, draft)).draft is None
    models, bad = open_models(base, draft), [BadPrompt(0, "a:1", "bad")]
    assert with_fastest_tree(models, bad, 1, COLD) is models


def test_the_prompts_of_a_race_are_spread_evenly(base, draft, monkeypatch):
    raced = []
    monkeypatch.setattr(
        module,
        "fastest_tree",
        lambda *args: raced.append(args[1]) or Choice("plain", {"plain": 1.0}, None),
    )
    # A file sorted by task; one row of it is bad.
    rows = [
        BadPrompt(i, f"a:{i}", "bad") if i == 4 else Prompt(i, f"a:{i}", prompt_ids=(i,))
        for i in range(20)
    ]
    with_fastest_tree(open_models(base, draft), rows, 1, COLD)
    assert raced == [[[0], [8], [12], [16], [1]]]


@pytest.fixture
def decode(command, prompts_file, tmp_path):
    """Decode the prompts with the command; return the rows and what is said of them."""

    def run(name, *argv):
        prompts = prompts_file(*({"prompt_ids": ids} for ids in PROMPTS[:2]))
        common = f"--prompts={prompts}", f"--output={tmp_path / name}", "--batch_size=2"
        status, _, error = command(*common, "--max_new_tokens=12", *argv)
        assert status == 0, error
        return rows_in(tmp_path / name), error

    return run


def test_a_race_decodes_in_every_way_and_changes_no_text(decode, draft, monkeypatch):
    # Few ways, since each compiles programs of its own.
    def few(models, sampling):
        return {name: candidates(models, sampling)[name] for name in ("plain", "chain:2")}

    monkeypatch.setattr(module, "candidates", few)
    plain, _ = decode("plain.jsonl")
    rows, error = decode("auto.jsonl", f"--draft={draft}", "--tree=auto")
    assert [row["output_ids"] for row in rows] == [row["output_ids"] for row in plain]
    (line,) = (one for one in error.splitlines() if one.startswith("tree: "))
    assert "chain:2" in line
    assert "plain" in line
    assert line.endswith(f", remembered in {draft / 'trees.json'}")
    entry = json.loads((draft / "trees.json").read_text())["choices"][0]
    assert min(entry["tokens_per_second"].values()) > 0


def test_a_turn_has_as_many_tokens_a_row_as_it_has_time_for(base, draft):
    ways = {"plain": open_models(base, draft).plain()}
    settings = dataclasses.replace(COLD, ignore_eos=True, max_new_tokens=100)
    times = iter((0.0, 1.6))  # sixteen steps of two rows
    passes = module._passes(ways, PROMPTS[:2], 2, GREEDY, settings, lambda: next(times))
    assert passes["plain"](0) == 2 * 10 * module.TURN_SECONDS


def test_a_prompt_without_room_for_new_tokens_is_shortened(base, draft, monkeypatch):
    monkeypatch.setattr(module, "candidates", lambda models, _: {"plain": models.plain()})
    monkeypatch.setattr(module, "TURN_SECONDS", 1e9)  # as many tokens as a turn may have
    assert fastest_tree(open_models(base, draft), PROMPTS[2:], 1, COLD).rates["plain"] > 0


@pytest.mark.parametrize("gains", [(1.5, 0.5), (0.5, 1.5)])
def test_rows_that_were_begun_go_on_with_their_tree(decode, draft, rates, tmp_path, gains):
    argv = (f"--draft={draft}", "--tree=auto")
    rates(gains[0])
    rows, _ = decode("begun.jsonl", *argv)
    # Stopped while it wrote; since then another tree has become the fastest.
    (tmp_path / "begun.jsonl").write_bytes(b'{"index": 0, "pro')
    (draft / "trees.json").unlink()
    rates(gains[1])
    again, error = decode("begun.jsonl", *argv)
    assert f"which {tmp_path / 'begun.jsonl'} was begun with" in error
    assert [row["accepted"] for row in again] == [row["accepted"] for row in rows]
    assert any(np.concatenate([row["accepted"] for row in again])) == (gains[0] > 1)


@pytest.mark.parametrize(("module", "flag"), [(generate, "--draft"), (evaluate, "--drafts")])
def test_the_automatic_tree_takes_no_number_of_copies(base, capsys, module, flag):
    argv = f"--base={base}", f"{flag}=lookup", "--tree=auto", "--copy=3"
    status, _, error = run_command(capsys, module, *argv)
    assert status == 2
    assert "--copy=3: " in error
    assert "tries copies itself" in error
