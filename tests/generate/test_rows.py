"""The generate command on random tiny models: what it prints, writes and resumes."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clover_jax import generate
from clover_jax.data.detokenization import decode_text
from clover_jax.runtime.row_writer import RowWriter
from tests.tiny_checkpoints import copy_of

REPOSITORY = Path(generate.__file__).parents[1]


def ragged_rows(count=7):
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 2, 9, 40, 63, 64, 65], size=count, replace=False)
    return [{"prompt_ids": rng.integers(2, 261, length).tolist()} for length in lengths]


def without_times(row):
    return {key: value for key, value in row.items() if key != "seconds"}


def rows_of(path):
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


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
        assert [[row[key] for key in SAME] for row in drafted] == [
            [row[key] for key in SAME] for row in plain
        ]
    assert [row["index"] for row in drafted] == list(range(8))
    assert all(row["tau"] == 1 for row in plain)
    assert any(accepted > 0 for row in drafted for accepted in row["accepted"])
    assert list(drafted[0]) == [
        *("index", "prompt_ids", "output_ids", "text", "accepted", "target_forwards"),
        *("tau", "seconds", "finish_reason"),
    ]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    status, _, error = command(f"--prompts={prompts}", f"--output={output}", f"--draft={draft}")
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
    whole, figures = output.read_text().splitlines(), json.loads(lines[-1])
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
    assert [without_times(json.loads(line)) for line in resumed] == [
        without_times(json.loads(line)) for line in whole
    ]
    again = json.loads(lines[-1])
    counted = ("tau", "tokens", "target_forwards", "accepted_histogram", "rows", "failed")
    assert [again[key] for key in counted] == [figures[key] for key in counted]
    # Tokens and seconds are of all rows, and of this run's.
    assert 0 < again["new_tokens"] < again["tokens"] == figures["new_tokens"]
    assert 0 < again["new_seconds"] < again["seconds"]
    assert again["tokens_per_second"] == pytest.approx(
        again["new_tokens"] / again["new_seconds"], rel=0.05
    )

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
    assert texts(f"--draft={draft}", "--batch_size=2") == plain
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
    place = next(
        i
        for i in range(4, 18)
        if plain["text"].find(letters[i] + letters[i + 1]) == len("".join(letters[:i]))
        and "\N{REPLACEMENT CHARACTER}" not in letters[i] + letters[i + 1]
    )
    stopping = prompt | {"stop": ["never", letters[place] + letters[place + 1]]}
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
    assert status == 1
    assert failed["error"].endswith(
        "the base has no tokenizer files; give prompt_ids instead of text"
    )


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
    arguments = [sys.executable, "-m", "clover_jax.generate", f"--base={base}", "--prompt=the"]
    with subprocess.Popen(
        [*arguments, "--max_new_tokens=100"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout.read(3) == b"the"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
