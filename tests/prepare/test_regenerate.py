"""Self-distillation: answers of the base in the place of those in the data."""

import json
from pathlib import Path

import pytest

from clover_jax import cli, prepare
from clover_jax.data.chat import encode_prompt
from clover_jax.data.prepared import PreparedSamples
from clover_jax.data.records import Conversation, Text, TokenRow, TokenTurns
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from clover_jax.training.prepare_run import _prompt
from tests.data.conversations import conversation
from tests.killed_processes import lines_in, run_through_kills
from tests.tiny_folders import save_tiny_base, save_tiny_draft
from tests.tiny_tokenizers import CHAT_TEMPLATE

ROWS = [
    {"prompt": "the", "response": "an answer that goes"},
    {"messages": [{"role": "user", "content": "he"}, {"role": "assistant", "content": "x"}] * 2},
    {"prompt_ids": [5, 6], "output_ids": [7]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = save_tiny_base(folder / "base", template=CHAT_TEMPLATE)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return base, save_tiny_draft(folder / "draft", base), data


def run(folders, output, **changes):
    base, _, data = folders
    flags = {"base": base, "data": data, "output": output, "seq_len": 96, "max_new_tokens": 9}
    flags |= {"regenerate": "true", "batch_size": 2}
    arguments = [f"--{name}={value}" for name, value in (flags | changes).items()]
    return cli.run(prepare.main, prepare.define_flags, arguments)


def rows_of(output):
    return [json.loads(line) for line in (output / "regenerated.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(folders, tmp_path_factory):
    output = tmp_path_factory.mktemp("plain") / "out"
    assert run(folders, output) == 0
    return output


def test_samples_hold_the_bases_own_answers_answer_by_answer(folders, plain):
    rows, samples = rows_of(plain), PreparedSamples(plain)
    assert len(rows) == 3
    kept = [samples[index] for index in range(len(samples))]
    answers = [rows[0]["output_ids"], *rows[1]["output_ids"], rows[2]["output_ids"]]
    learned = [token for sample in kept for token in sample.tokens[sample.loss_mask].tolist()]
    assert learned == [token for answer in answers for token in answer]
    # The second answer was given to the first one, which is the base's own.
    tokenizer = load_tokenizer(folders[0])
    asked = tokenizer.decode(rows[1]["prompt_ids"][1])
    assert asked == f"<s>[user]he[assistant]{rows[1]['text'][0]}[user]he[assistant]"
    assert kept[-1].tokens.tolist() == [5, 6, *rows[2]["output_ids"]]


def test_a_draft_changes_no_answer(folders, plain, tmp_path, capsys):
    assert run(folders, tmp_path, draft=folders[1]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["regenerated"]["tau"] > 1
    for a, b in zip(rows_of(plain), rows_of(tmp_path), strict=True):
        assert a["output_ids"] == b["output_ids"]


def test_a_stopped_run_goes_on_after_the_rows_that_are_there(folders, plain, tmp_path, capsys):
    lines = (plain / "regenerated.jsonl").read_text().splitlines(keepends=True)
    manifest = (plain / "regenerated.jsonl.manifest.json").read_text()
    (tmp_path / "regenerated.jsonl").write_text(lines[0] + lines[1][:20])
    (tmp_path / "regenerated.jsonl.manifest.json").write_text(manifest)
    assert run(folders, tmp_path) == 0
    again = rows_of(tmp_path)
    assert again[0] == rows_of(plain)[0]
    assert [row["output_ids"] for row in again] == [row["output_ids"] for row in rows_of(plain)]
    assert run(folders, tmp_path, temperature=0.5) == 2
    assert "temperature 0.0, not 0.5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("count, kills, mesh", [(2, 10, []), (4, 10, ["--mesh=data=2,fsdp=2"])])
def test_processes_that_are_killed_give_the_answers_of_one(folders, tmp_path, count, kills, mesh):
    rows = [{"prompt": "ab" * i, "response": "x"} for i in range(1, 13)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(folders, tmp_path / "one", data=data) == 0

    ours, plain = tmp_path / "ours", rows_of(tmp_path / "one")
    flags = {"base": folders[0], "data": data, "output": ours, "seq_len": 96, "max_new_tokens": 9}
    flags |= {"regenerate": "true", "batch_size": 2}
    command = ["prepare", *(f"--{name}={value}" for name, value in flags.items()), *mesh]
    kept = lines_in(ours / "regenerated.jsonl")
    status, said, errors = run_through_kills(kills, kept, len(plain), count, *command)
    assert status == 0, errors
    assert said.count("train with --data=") == 1
    assert [row["output_ids"] for row in rows_of(ours)] == [row["output_ids"] for row in plain]
    counts = [PreparedSamples(folder).counts for folder in (ours, tmp_path / "one")]
    assert counts[0] == counts[1]


def test_a_row_that_fails_is_left_out_and_told_by_the_status(folders, tmp_path, capsys):
    base, draft, _ = folders
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt_ids": [10**6], "output_ids": [7]}, ROWS[2]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # the second time the rows are there
        assert run((base, draft, data), tmp_path / "out") == 1
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (report["regenerated"]["failed"], report["samples"]) == (1, 1)


def test_plain_text_has_no_answers():
    with pytest.raises(UserError, match="f:1: plain text has no answers"):
        _prompt(0, Text("f:1", "hello"))


def test_what_the_base_is_asked_keeps_the_system_and_joins_what_one_side_says(tmp_path):
    messages = (
        *(("system", "be nice"), ("assistant", "welcome"), ("user", "a"), ("user", "b")),
        *(("assistant", "x"), ("user", "c")),
    )
    prompt = _prompt(3, conversation("f", messages))
    assert prompt.turns == ("a\nb", "c")
    tokenizer = load_tokenizer(Path(save_tiny_base(tmp_path / "base")))
    ids = encode_prompt(prompt, tokenizer, 300, ["ANSWER"])
    assert tokenizer.decode(ids) == "be nice\na\nb\nANSWER\nc\n"


def test_tools_keep_what_they_said_and_the_base_answers_after_them(tmp_path):
    call = {"role": "assistant", "content": "look", "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "4 degrees", "tool_call_id": "c1"}
    answer = {"role": "assistant", "content": "old"}
    asked = {"role": "user", "content": "a"}
    record = Conversation(
        "f", (asked, call, result, call, result, answer, asked, answer), {"tools": [{"name": "f"}]}
    )
    prompt = _prompt(3, record)
    assert prompt.turns == ((asked, call, result, call, result), "a")
    assert prompt.variables == {"tools": [{"name": "f"}]}
    template = (
        "{{ tools | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.tool_calls %}<call>{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(Path(save_tiny_base(tmp_path / "base", template=template)))
    ids = encode_prompt(prompt, tokenizer, 300, ["NEW"])
    assert tokenizer.decode(ids) == (
        "1[user]a[assistant]look<call>[tool]4 degrees[assistant]look<call>[tool]4 degrees"
        "[assistant]NEW[user]a"
    )


def test_token_rows_are_asked_what_came_before_their_first_answer():
    assert _prompt(0, TokenRow("f", (1, 2), (3,))).prompt_ids == (1, 2)
    assert _prompt(0, TokenTurns("f", (((1,), (2,)), ((3,), (4,))))).prompt_ids == (1,)


def test_a_conversation_without_a_question_is_refused():
    with pytest.raises(UserError, match="no user message"):
        _prompt(0, conversation("f", (("assistant", "hi"),)))
