"""The generate command on random tiny models: what it prints, writes, resumes and refuses."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from clover_jax import api
from clover_jax.data.detokenization import decode_text
from clover_jax.data.prompts import parse_prompt
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Generation, RowUpdate
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.row_state import RowState
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.errors import UserError
from clover_jax.runtime.row_writer import RowWriter
from tests.conftest import REPOSITORY, rows_in
from tests.tiny_checkpoints import copy_of


def ragged_rows(count=7):
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 2, 9, 40, 63, 64, 65], size=count, replace=False)
    return [{"prompt_ids": rng.integers(2, 261, length).tolist()} for length in lengths]


def without_times(row):
    return {key: value for key, value in row.items() if key != "seconds"}


def rows_of(path):
    return [without_times(row) for row in rows_in(path)]


def test_a_prompt_is_continued_on_stdout_and_the_last_line_is_json(command, draft):
    status, lines, error = command("--prompt=the cat", f"--draft={draft}", "--max_new_tokens=9")
    assert status == 0
    assert "\n".join(lines[:-1]).startswith("the cat")
    result = json.loads(lines[-1])
    assert (result["tokens"], result["rows"], result["failed"]) == (9, 1, 0)
    assert result["tau"] == pytest.approx(8 / result["target_forwards"])
    assert sum(result["accepted_histogram"]) == result["target_forwards"]
    assert result["tokens_per_second"] > 0
    assert "\033" not in "".join(lines)
    assert f"9 tokens in {result['target_forwards']} forwards" in error


SAME = ("index", "prompt_ids", "output_ids", "text", "finish_reason")


def test_drafted_rows_equal_plain_rows_whatever_the_batch_and_rounding(
    decode, draft, command, tmp_path
):
    rows = [*ragged_rows(), {"prompt": "the hat"}]
    _, plain = decode(rows, "--batch_size=1")
    for flags in ([], ["--int8=draft"]):
        status, drafted = decode(rows, f"--draft={draft}", *flags)
        assert status == 0
        for row, other in zip(drafted, plain, strict=True):
            assert [row[key] for key in SAME] == [other[key] for key in SAME]
    assert [row["index"] for row in drafted] == list(range(8))
    assert all(row["tau"] == 1 for row in plain)
    assert any(accepted > 0 for row in drafted for accepted in row["accepted"])
    assert list(drafted[0]) == [
        *("index", "prompt_ids", "output_ids", "text", "accepted", "target_forwards"),
        *("tau", "seconds", "finish_reason"),
    ]
    files = f"--prompts={tmp_path / 'prompts.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"
    status, _, error = command(*files, f"--draft={draft}")
    assert status == 2
    assert "out.jsonl was written with" in error, "by a rounded head"


def test_rows_go_to_stdout_in_input_order_without_an_output(command, prompts_file):
    rows = [{"prompt": "a", "max_new_tokens": 30}, *({"prompt": text} for text in "bcd")]
    path = prompts_file(*rows)
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    status, lines, _ = command(f"--prompts={packed}", "--batch_size=2", "--max_new_tokens=3")
    assert status == 0
    *printed, result = map(json.loads, lines)
    assert [row["index"] for row in printed] == [0, 1, 2, 3]
    assert [len(row["output_ids"]) for row in printed] == [30, 3, 3, 3]
    assert (result["rows"], result["tokens"]) == (4, 39)


def test_prompts_come_from_standard_input(command, monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    monkeypatch.setattr("sys.stdin", typed)
    status, lines, _ = command("--prompts=-", "--max_new_tokens=3")
    assert status == 0
    assert [json.loads(line).get("index") for line in lines[:2]] == [0, 1]


def test_a_killed_run_goes_on_to_the_same_file(command, prompts_file, draft, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    rows = [*ragged_rows(5), {"prompt": "bad", "temperature": -1}]
    arguments = (
        *(f"--prompts={prompts_file(*rows)}", f"--draft={draft}", f"--output={output}"),
        *("--batch_size=2", "--max_new_tokens=12"),
    )
    status, lines, _ = command(*arguments)
    assert status == 1
    whole, figures = rows_of(output), json.loads(lines[-1])
    output.unlink()
    append = RowWriter.append

    def append_two(self, row):
        append(self, row)
        if self.finished >= 2:
            self._file.write(b'{"index": 2, "pro')
            raise KeyboardInterrupt

    monkeypatch.setattr(RowWriter, "append", append_two)
    assert command(*arguments)[0] == 130
    monkeypatch.setattr(RowWriter, "append", append)
    begun = output.read_text().splitlines()[:2]

    status, lines, error = command(*arguments)
    assert status == 1
    assert "2 rows are in" in error
    resumed = output.read_text().splitlines()
    assert resumed[:2] == begun
    assert rows_of(output) == whole
    again = json.loads(lines[-1])
    counted = ("tau", "tokens", "target_forwards", "accepted_histogram", "rows", "failed")
    assert [again[key] for key in counted] == [figures[key] for key in counted]
    # Tokens and seconds are of all rows, and of this run's.
    assert 0 < again["new_tokens"] < again["tokens"] == figures["new_tokens"]
    assert 0 < again["new_seconds"] < again["seconds"]
    rate = again["new_tokens"] / again["new_seconds"]
    assert again["tokens_per_second"] == pytest.approx(rate, rel=0.05)

    status, lines, _ = command(*arguments)
    assert (status, output.read_text().splitlines()) == (1, resumed)
    last = json.loads(lines[-1])
    assert (last["tokens_per_second"], last["new_tokens"]) == (None, 0)
    assert last["seconds"] >= again["seconds"]


def test_sampled_text_is_that_of_plain_sampling_row_by_row(command, prompts_file, draft):
    hot = [{**row, "temperature": 0.8, "seed": i} for i, row in enumerate(ragged_rows(4))]
    path = prompts_file(*hot, {"prompt": "cold", "temperature": 0}, {"prompt": "a", "top_k": 3})
    arguments = (f"--prompts={path}", "--temperature=1.2", "--top_p=0.9", "--max_new_tokens=12")

    def texts(*more):
        status, lines, _ = command(*arguments, *more)
        assert status == 0
        return [json.loads(line)["output_ids"] for line in lines[:-1]]

    plain = texts("--batch_size=3")
    assert texts(f"--draft={draft}", "--draft_sampling=topk", "--batch_size=2") == plain
    assert texts("--batch_size=3", "--seed=7")[:5] == plain[:5]  # seeds of their own, or greedy
    assert texts("--batch_size=3", "--seed=7")[5] != plain[5]


def test_turns_are_played_in_order_each_answer_in_the_next_context(decode, draft, tokenizer):
    turns = ["the", "he", "at the"]
    rows = [{"turns": turns}, {"prompt": "x"}, {"question": "the"}]
    _, (row, _, question) = decode(rows, f"--draft={draft}")
    columns = set(row) - {"index"}
    assert all(len(row[name]) == 3 for name in columns)
    text = "the\n"
    for turn in range(3):
        assert row["prompt_ids"][turn] == tokenizer(text).input_ids
        answer = row["text"][turn]
        assert answer == decode_text(tokenizer, row["output_ids"][turn])
        text += answer + "\n" + (turns[turn + 1] + "\n" if turn < 2 else "")
    _, alone = decode([{"prompt_ids": ids} for ids in row["prompt_ids"]])
    assert [one["output_ids"] for one in alone] == row["output_ids"]
    assert question["output_ids"] == row["output_ids"][0]


def test_a_stop_string_cuts_text_and_tokens(decode, draft, tokenizer):
    prompt = {"prompt": "!"}
    _, (plain,) = decode([prompt])
    letters = [decode_text(tokenizer, [id_]) for id_ in plain["output_ids"]]
    # A stop of two tokens that stand together for the first time at `place`.
    pairs = [(i, letters[i] + letters[i + 1], "".join(letters[:i])) for i in range(4, 18)]
    pairs = [pair for pair in pairs if "\N{REPLACEMENT CHARACTER}" not in pair[1]]
    found = ((i, two) for i, two, before in pairs if plain["text"].find(two) == len(before))
    place, stop = next(found)
    stopping = prompt | {"stop": ["never", stop]}
    for flags in ([], [f"--draft={draft}"]):
        _, (row, other) = decode([stopping, prompt], *flags, "--batch_size=1")
        assert row["finish_reason"] == "stop"
        assert row["output_ids"] == plain["output_ids"][:place]
        assert row["text"] == "".join(letters[:place])
        # Forwards up to the one that gave the last token that is kept, none after it.
        emitted = [1 + sum(a + 1 for a in row["accepted"][:n]) for n in (-1, None)]
        assert emitted[0] < place <= emitted[1]
        assert flags or row["tau"] == 1
        assert other["output_ids"] == plain["output_ids"]
    _, (row,) = decode([stopping | {"include_stop_str_in_output": True}], f"--draft={draft}")
    assert row["output_ids"] == plain["output_ids"][: place + 2]
    assert (row["text"], row["finish_reason"]) == ("".join(letters[: place + 2]), "stop")


def test_a_stop_token_ends_the_text_and_a_special_one_may_be_named(
    decode, base, tokenizer, tmp_path
):
    _, (plain,) = decode([{"prompt": "the"}])
    ids = plain["output_ids"]
    at = next(i for i in range(1, len(ids)) if ids[i] not in ids[:i])
    stopping = {"prompt": "the", "stop_token_ids": [ids[at], 3]}
    kept = stopping | {"include_stop_str_in_output": True}
    _, (row, whole) = decode([stopping, kept])
    for one in (row, whole):
        assert (one["output_ids"], one["finish_reason"]) == (ids[: at + 1], "stop")
    # The token that ends a text is part of it only where that is wanted.
    texts = [decode_text(tokenizer, ids[:end], row["prompt_ids"]) for end in (at, at + 1)]
    assert [row["text"], whole["text"]] == texts

    # The same token under a name that the tokenizer holds for special: it has no text.
    copy = shutil.copytree(base, tmp_path / "base")
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    special = {"id": ids[at], "content": "<|end|>", "special": True, "normalized": False}
    special |= {"single_word": False, "lstrip": False, "rstrip": False}
    vocabulary = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    del tokenizer["model"]["vocab"][vocabulary[ids[at]]]
    tokenizer["model"]["vocab"]["<|end|>"] = ids[at]
    gone = vocabulary[ids[at]]
    tokenizer["model"]["merges"] = [
        pair for pair in tokenizer["model"]["merges"] if gone not in (*pair, "".join(pair))
    ]
    tokenizer["added_tokens"].append(special)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    asked = {"prompt_ids": plain["prompt_ids"], "stop": "<|end|>"}
    more = ({}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False})
    _, rows = decode([asked | one for one in more], base=copy)
    for named in rows:
        assert (named["output_ids"], named["finish_reason"]) == (ids[: at + 1], "stop")
    text = rows[0]["text"]
    assert [named["text"] for named in rows] == [text, f"{text}<|end|>", text]
    going_on = asked | {"stop": [], "skip_special_tokens": False}
    _, (named,) = decode([going_on], base=copy)
    assert named["text"].startswith(f"{text}<|end|>")
    # A server names the special tokens that it reads.
    prompt = parse_prompt({"prompt_ids": plain["prompt_ids"]}, 0, "p.jsonl:1")
    state = RowState(prompt, GenerationSettings(), api.load_base(str(copy)), shown=["<|end|>", "a"])
    state.next_request()
    generation = Generation(0, plain["prompt_ids"], ids, finish_reason="length")
    assert state.take(RowUpdate(generation, ids, True)).turn.text == named["text"]


def test_rows_set_their_own_limit_and_eos_ends_them(decode, base, tmp_path):
    row = {"prompt": "the", "max_new_tokens": 7}
    _, (plain,) = decode([row])
    assert (len(plain["output_ids"]), plain["finish_reason"]) == (7, "length")
    ids = plain["output_ids"]
    end = next(i for i in range(1, 7) if ids[i] not in ids[:i])
    ending = copy_of(base, tmp_path / "ending")
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, ids[end]]}))
    _, (row_ended,) = decode([row], base=ending)
    assert (row_ended["output_ids"], row_ended["finish_reason"]) == (ids[: end + 1], "eos")
    _, (ignored,) = decode([row], "--ignore_eos", base=ending)
    assert ignored["output_ids"] == ids


def test_an_official_clover2_folder_decodes_as_plain_without_a_tokenizer(decode, fixtures_dir):
    reference = fixtures_dir / "clover2_reference"
    rows = [{"prompt_ids": [5, 17, 40]}, {"prompt_ids": list(range(30))}]
    _, plain = decode(rows, base=reference / "base")
    _, drafted = decode(rows, f"--draft={reference / 'clover2'}", base=reference / "base")
    assert [row["output_ids"] for row in drafted] == [row["output_ids"] for row in plain]
    assert [row["text"] for row in drafted] == [None, None]
    status, (failed,) = decode([{"prompt": "words"}], base=reference / "base")
    said = "the base has no tokenizer files; give prompt_ids instead of text"
    assert (status, failed["error"].endswith(said)) == (1, True)


def test_without_a_prompt_the_base_s_own_first_one_is_taken(command, base, tmp_path):
    _, _, error = command()
    assert "has no prompts.jsonl; give --prompt=TEXT or --prompts=FILE" in error
    own = copy_of(base, tmp_path / "own")
    (own / "prompts.jsonl").write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    status, lines, _ = command("--max_new_tokens=3", base=own)
    assert status == 0
    assert lines[0].startswith("first")
    assert json.loads(lines[-1])["rows"] == 1


def test_a_real_process_streams_into_a_pipe_and_ends_when_its_reader_leaves(base):
    flags, pipe = (f"--base={base}", "--prompt=the", "--max_new_tokens=100"), subprocess.PIPE
    command = [sys.executable, "-m", "clover_jax.generate", *flags]
    how = {"cwd": REPOSITORY, "env": os.environ | {"PYTHONUNBUFFERED": "1"}}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, **how) as process:
        assert process.stdout.read(3) == b"the"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


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
    written = rows_in(tmp_path / "out")
    assert [row["index"] for row in written] == list(range(8))
    assert written[0]["output_ids"] == written[5]["output_ids"]
    said = [
        f"{path}:2: expected one of prompt, question",
        f"{path}:3: temperature 0.7 asks for sampling, which verify=greedy does not do",
        f"{path}:4: token id 261 is outside the base's vocabulary, 0 to 260",
        f"{path}:5: the prompt has 128 tokens and the base's context is 128; shorten it",
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
        (["--prompt=a", "--draft=/nowhere"], "--draft=/nowhere: the folder /nowhere does not ex"),
        (["--base=/nowhere", "--draft=/no/draft"], "--draft=/no/draft: the folder /no/draft do"),
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
    status, _, error = command("--prompt=a", f"--draft={draft}", "--tree=none")
    assert status == 2
    assert "tree 'none' has no nodes for the draft to fill; give another tree" in error
    # So does a strict run that fails at once.
    bad = f"--prompts={prompts_file({'prompt': 'a' * 5000})}"
    again = command(bad, "--strict", f"--output={tmp_path / 'out'}", "--overwrite")
    assert (again[0], (tmp_path / "out").read_bytes()) == (2, before)


def test_a_strict_run_keeps_the_rows_before_the_one_that_fails(command, prompts_file, tmp_path):
    rows = [{"prompt": "a", "max_new_tokens": 40}, {"prompt": "b"}, {"prompt_ids": [261]}]
    rows += [{"prompt": "c"}] * 3
    arguments = [f"--prompts={prompts_file(*rows)}", "--batch_size=2", "--max_new_tokens=2"]
    arguments += [f"--output={tmp_path / 'out'}", "--strict"]
    for _ in range(2):  # and the same command goes on behind them
        status, _, error = command(*arguments)
        assert (status, "token id 261 is outside" in error) == (2, True)
        written = rows_in(tmp_path / "out")
        assert [len(row["output_ids"]) for row in written] == [40, 2]


def test_rows_go_into_files_only(command, prompts_file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    given = (f"--prompts={prompts_file({'prompt': 'a'})}", "--max_new_tokens=2")
    for path in ("/dev/null", tmp_path / "pipe"):
        status, _, error = command(*given, f"--output={path}")
        said = f"--output={path} is not a regular file, which a stopped run needs to resume"
        assert (status, said in error) == (2, True)


def test_a_base_without_a_template_is_said(command, prompts_file, tokenizer):
    path = prompts_file({"turns": ["a"]}, {"prompt": "b"})
    _, _, error = command(f"--prompts={path}", "--max_new_tokens=2")
    assert "no chat template: messages of 1 conversations are joined with newlines" in error
    given = f"--prompts={path}", "--max_new_tokens=2"
    _, lines, error = command(*given, "--chat_template=baichuan2")
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
    few = f"--prompts={prompts_file(*rows)}", "--max_new_tokens=2"
    _, lines, error = command(*few, "--context_overflow=skip")
    assert json.loads(lines[-1])["skipped"] == 1
    assert "row 0 skipped: " in error


SAMPLED = SamplingConfig("lossless", "sampled")


def row(**options):
    return parse_prompt({"prompt": "a", **options}, 0, "p.jsonl:1")


def test_a_row_s_own_settings_win():
    settings = GenerationSettings(max_new_tokens=5, stop=("x",), ignore_eos=True)
    assert settings.for_row(row()) == settings
    own = settings.for_row(row(max_new_tokens=9, stop="y", temperature=0))
    assert (own.max_new_tokens, own.stop, own.ignore_eos) == (9, ("y",), True)
    with pytest.raises(UserError, match=r"p\.jsonl:1: temperature 0\.7 asks for sampling"):
        GenerationSettings(verify="greedy").for_row(row(temperature=0.7))


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({}, {}, SamplingConfig("greedy")),
        ({}, {"temperature": 0.5}, SamplingConfig("lossless", "auto")),
        ({"temperature": 1.0}, {"top_k": 3}, SamplingConfig("lossless", "auto", truncate=True)),
        ({"temperature": 1.0, "draft_sampling": "sampled"}, {}, SAMPLED),
        ({"draft_sampling": "sampled"}, {}, SAMPLED),
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
        ({"context_overflow": "nope"}, "context_overflow 'nope' is not one of error, "),
        ({"top_k": -1}, r"top_k \(-1\) must be 1 or more, or 0 for all tokens"),
        ({"top_p": 0.0}, r"top_p \(0.0\) must lie in \(0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused(values, said):
    with pytest.raises(UserError, match=said):
        GenerationSettings(**values)


def test_one_stop_string_may_be_given_as_such():
    assert [GenerationSettings(stop=s).stop for s in ("a", ["a"], ("a",))] == [("a",)] * 3
    assert GenerationSettings(stop=None).stop == ()
