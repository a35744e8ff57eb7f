"""The generate command and what it cannot decode; the settings of a row."""

import json
import os

import jax
import pytest

from clover_jax.data.prompts import parse_prompt
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.errors import UserError


def test_a_bad_row_is_reported_and_passed_over(command, prompts_file, tmp_path):
    rows = [
        {"prompt": "good"},
        {"promp": "misspelt"},
        {"prompt": "hot", "temperature": 0.7},
        {"prompt_ids": [5, 261]},
        {"prompt_ids": [5] * 128},
        {"prompt": "good"},
        {"prompt": "half an emoji \ud83d"},
        {"prompt": "good", "seed": 2**32},
    ]
    path = prompts_file(*rows)
    arguments = (f"--prompts={path}", f"--output={tmp_path / 'out'}", "--max_new_tokens=4")
    status, lines, error = command(*arguments, "--verify=greedy")
    assert status == 1
    written = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["index"] for row in written] == list(range(8))
    assert written[0]["output_ids"] == written[5]["output_ids"]
    said = [
        f"{path}:2: expected one of prompt, question",
        f"{path}:3: temperature 0.7 asks for sampling, which verify=greedy does not do",
        f"{path}:4: token id 261 is outside the base's vocabulary, 0 to 260",
        f"{path}:5: the prompt has 128 tokens and the base's context is 128; shorten it",
    ]
    said += [
        f'{path}:7: prompt must be a string, not "half an emoji \\ud83d", which holds half a ch',
        f"{path}:8: seed (4294967296) must lie in 0 .. 4294967295",
    ]
    for row, start in zip(written[1:5] + written[6:], said, strict=True):
        assert row["error"].startswith(start)
        assert set(row) == {"index", "error"}
        assert f"row {row['index']} failed: {start}" in error
    assert (json.loads(lines[-1])["rows"], json.loads(lines[-1])["failed"]) == (8, 6)


@pytest.mark.parametrize("bad", [{"promp": "misspelt"}, {"prompt_ids": [261]}])
def test_strict_makes_a_bad_row_fatal(command, prompts_file, bad):
    path = prompts_file({"prompt": "good"}, bad)
    status, lines, error = command(f"--prompts={path}", "--strict", "--max_new_tokens=4")
    assert status == 2
    assert f"clover_jax.generate: {path}:2: " in error
    assert not any("tau" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prompt=a", "--prompts=b"], "--prompt and --prompts exclude each other"),
        (["--prompt="], "the prompt is empty; give at least one token"),
        (["--prompts=/nowhere.jsonl"], "/nowhere.jsonl: No such file or directory"),
        (["--prompt=a", "--tree=paper25"], "'paper25' has 25 nodes and there is no draft to fill"),
        (
            ["--prompt=a", "--draft=/nowhere"],
            "--draft=/nowhere: the folder /nowhere does not exist",
        ),
        (
            ["--base=/nowhere", "--draft=/no/draft"],
            "--draft=/no/draft: the folder /no/draft does not",
        ),
        (["--prompts=a", "--output=/dev/stdout"], "leave --output out to print the rows on stdout"),
        (["--prompt=a", "--temperature=0.5", "--verify=greedy"], "asks for sampling"),
        (
            ["--prompt=a", "--temperature=1", "--verify=typical", "--draft_sampling=sampled"],
            "draft_sampling 'sampled' needs verify 'lossless'",
        ),
        (["--prompt=a", "--max_new_tokens=0"], "--max_new_tokens=0"),
        (["--prompt=a", "--stop="], "a stop string is empty"),
        (["--prompt=a", "--tree=auto"], "--tree=auto chooses a tree for a draft; give --draft=DIR"),
        (["--prompt=a", "--overwrite"], "--overwrite is for --output=FILE, which is missing"),
        (["--prompts=a", "--output=b/../a"], "--output=b/../a is a file of prompts"),
        (["--prompt=a", "--mesh=data=2"], "--mesh=data=2 asks for 2 devices, but 1 is here"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, argv, said):
    status, lines, error = command(*argv)
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert said in error


def test_too_little_memory_says_what_to_do(command, prompts_file, monkeypatch):
    def stream(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(Engine, "stream", stream)
    path = prompts_file({"prompt": "a"}, {"prompt": "b"})
    status, lines, error = command(f"--prompts={path}")
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert "too little memory to decode 2 rows at once; give a smaller --batch_size" in error


def test_other_settings_are_refused_and_named(command, prompts_file, tmp_path, draft):
    arguments = (f"--prompts={prompts_file({'prompt': 'a'})}", f"--output={tmp_path / 'out'}")
    assert command(*arguments, "--max_new_tokens=3")[0] == 0
    before = (tmp_path / "out").read_bytes()
    status, lines, error = command(*arguments, "--max_new_tokens=4")
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert "was written with max_new_tokens 3, not 4; repeat that command" in error
    assert (tmp_path / "out").read_bytes() == before
    assert command(*arguments, "--max_new_tokens=4", "--overwrite")[0] == 0


def test_a_mistake_leaves_the_rows_that_are_there(command, prompts_file, tmp_path, draft):
    arguments = [f"--prompts={prompts_file({'prompt': 'a'})}", "--max_new_tokens=3"]
    assert command(*arguments, f"--output={tmp_path / 'out'}")[0] == 0
    before = (tmp_path / "out").read_bytes()
    draws = [f"--draft={draft}", "--draft_sampling=sampled", "--tree=dynamic:5"]
    again = command(*arguments, *draws, f"--output={tmp_path / 'out'}", "--overwrite")
    assert (again[0], (tmp_path / "out").read_bytes()) == (2, before)
    assert "tree 'dynamic:5' is chosen by probability" in again[2]
    assert command(*arguments, *draws, f"--output={tmp_path / 'new' / 'out'}")[0] == 2
    assert not (tmp_path / "new").exists()


def test_a_strict_run_keeps_the_rows_before_the_one_that_fails(command, prompts_file, tmp_path):
    rows = [{"prompt": "a", "max_new_tokens": 40}, {"prompt": "b"}, {"prompt_ids": [261]}]
    rows += [{"prompt": "c"}] * 3
    arguments = [f"--prompts={prompts_file(*rows)}", "--batch_size=2", "--max_new_tokens=2"]
    arguments += [f"--output={tmp_path / 'out'}", "--strict"]
    for _ in range(2):  # and the same command goes on behind them
        status, _, error = command(*arguments)
        assert (status, "token id 261 is outside" in error) == (2, True)
        written = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        assert [len(row["output_ids"]) for row in written] == [40, 2]


def test_rows_go_into_files_only(command, prompts_file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    given = (f"--prompts={prompts_file({'prompt': 'a'})}", "--max_new_tokens=2")
    for path in ("/dev/null", tmp_path / "pipe"):
        status, _, error = command(*given, f"--output={path}")
        said = f"--output={path} is not a regular file, which a stopped run needs to resume"
        assert (status, said in error) == (2, True)


def test_a_strict_run_that_fails_at_once_leaves_the_rows_that_are_there(
    command, prompts_file, tmp_path
):
    good, output = prompts_file({"prompt": "a"}), tmp_path / "out"
    assert command(f"--prompts={good}", "--max_new_tokens=3", f"--output={output}")[0] == 0
    before = output.read_bytes()
    bad = prompts_file({"prompt": "a" * 5000})
    again = command(f"--prompts={bad}", "--strict", f"--output={output}", "--overwrite")
    assert (again[0], output.read_bytes()) == (2, before)


def test_a_draft_needs_a_tree_with_nodes(command, draft):
    status, _, error = command("--prompt=a", f"--draft={draft}", "--tree=none")
    assert status == 2
    assert "tree 'none' has no nodes for the draft to fill; give another tree" in error


def test_a_base_without_a_template_is_said(command, prompts_file, tokenizer):
    path = prompts_file({"turns": ["a"]}, {"prompt": "b"})
    _, _, error = command(f"--prompts={path}", "--max_new_tokens=2")
    assert "no chat template: messages of 1 conversations are joined with newlines" in error
    _, lines, error = command(
        f"--prompts={path}", "--max_new_tokens=2", "--chat_template=baichuan2"
    )
    assert "no chat template" not in error
    assert json.loads(lines[0])["prompt_ids"] != tokenizer("a\n").input_ids


def test_a_prompt_beyond_the_context_is_cut_on_the_left_or_skipped(decode, command, prompts_file):
    ids = [0, *range(2, 202)]
    rows = [{"prompt_ids": ids}, {"prompt": "the"}]
    status, (cut, _) = decode(rows, "--context_overflow=truncate_left")
    assert status == 0
    assert cut["prompt_ids"] == [0, *ids[-(128 - 20 - 1) :]]  # BOS stays, and room for 20
    assert len(cut["output_ids"]) == 20
    status, (skipped, good) = decode(rows, "--context_overflow=skip")
    assert status == 0
    assert skipped["skipped"].endswith("has 201 tokens and the base's context is 128")
    assert len(good["output_ids"]) == 20
    _, lines, error = command(
        f"--prompts={prompts_file(*rows)}", "--context_overflow=skip", "--max_new_tokens=2"
    )
    assert json.loads(lines[-1])["skipped"] == 1
    assert "row 0 skipped: " in error


def row(**options):
    return parse_prompt({"prompt": "a", **options}, 0, "p.jsonl:1")


def test_a_row_s_own_settings_win():
    settings = GenerationSettings(max_new_tokens=5, stop=("x",), ignore_eos=True)
    assert settings.for_row(row()) == settings
    own = settings.for_row(row(max_new_tokens=9, stop="y", temperature=0))
    assert (own.max_new_tokens, own.stop, own.ignore_eos) == (9, ("y",), True)


def test_a_row_that_wants_what_cannot_be_is_named():
    with pytest.raises(UserError, match=r"p\.jsonl:1: temperature 0\.7 asks for sampling"):
        GenerationSettings(verify="greedy").for_row(row(temperature=0.7))


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({}, {}, SamplingConfig("greedy")),
        ({}, {"temperature": 0.5}, SamplingConfig("lossless")),
        ({"temperature": 1.0}, {"top_k": 3}, SamplingConfig("lossless", truncate=True)),
        (
            {"temperature": 1.0, "draft_sampling": "sampled"},
            {},
            SamplingConfig("lossless", "sampled"),
        ),
        ({"draft_sampling": "sampled"}, {}, SamplingConfig("lossless", "sampled")),
        ({"verify": "typical"}, {"temperature": 0.5}, SamplingConfig("typical")),
    ],
)
def test_the_engine_does_what_some_row_needs_and_no_more(settings, options, expected):
    assert sampling_for(GenerationSettings(**settings), [row(**options)]) == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens \(0\) must be at least 1"),
        ({"verify": "greedy", "temperature": 1.0}, "which verify=greedy does not do"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"seed": 1.5}, "seed must be a whole number or None, not 1.5"),
        ({"stop": 0}, "stop must be text or several of them or None, not 0"),
        ({"stop": 5}, "stop must be text or several of them or None, not 5"),
        ({"stop": ["a", 5]}, r"stop must be strings, not \('a', 5\)"),
        ({"stop": ("",)}, "a stop string is empty"),
        (
            {"context_overflow": "nope"},
            "context_overflow 'nope' is not one of error, ",
        ),
        ({"temperature": 1e39}, r"temperature \(1e\+39\) must be 3\.40282e\+38 or less"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be 0 or more"),
        ({"top_k": -1}, r"top_k \(-1\) must be 1 or more, or 0 for all tokens"),
        ({"top_p": 0.0}, r"top_p \(0.0\) must lie in \(0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused(values, said):
    with pytest.raises(UserError, match=said):
        GenerationSettings(**values)


@pytest.mark.parametrize("stop", ["a", ["a"], ("a",)])
def test_one_stop_string_may_be_given_as_such(stop):
    assert GenerationSettings(stop=stop).stop == ("a",)
    assert GenerationSettings(stop=None).stop == ()
