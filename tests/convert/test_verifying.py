"""`convert --verify`: heads that decode otherwise than before are not kept."""

import json

import pytest

from clover_jax.evaluation import conversion
from tests.tiny_checkpoints import edit_tensors

WEIGHTS = "model.safetensors"
MLP = "clover_head_mlp.weight"


def test_prompts_are_to_verify_with(command):
    error = command("--input=x", "--output=y", "--prompts=p.jsonl")[2]
    assert error == ("clover_jax.convert: --prompts=p.jsonl is for --verify, which is missing\n")


@pytest.fixture
def verifying(speaking, tmp_path):
    """The flags of a verified conversion to Clover-2's layout, with three prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [5, 6, 7 + i]}) + "\n" for i in range(3)))
    heads = (f"--input={speaking / 'head'}", f"--output={tmp_path / 'out'}", "--to=clover2")
    decoding = (f"--prompts={prompts}", "--max_new_tokens=40", "--verify")
    return (f"--base={speaking / 'base'}", *heads, *decoding)


def test_verifying_decodes_with_both_and_prints_both_taus(command, verifying, tmp_path):
    status, report, error = command(*verifying)
    assert status == 0
    assert report["tau_source"] == report["tau_result"] > 1
    assert (report["prompts"], report["differing"]) == (3, [])
    assert "the same accepted lengths on all 3 prompts" in error
    assert (tmp_path / "out" / WEIGHTS).is_file()


def test_prompts_that_are_not_there_stop_before_anything_is_written(command, speaking, tmp_path):
    given = (f"--base={speaking / 'base'}", f"--input={speaking / 'head'}", "--verify")
    status, _, error = command(*given, "--prompts=p.jsonl", f"--output={tmp_path / 'out'}")
    assert (status, "p.jsonl" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_without_prompts_single_tokens_are_decoded(command, speaking, tmp_path):
    given = (f"--base={speaking / 'base'}", f"--input={speaking / 'head'}", "--verify")
    decoding = (*given, "--num_prompts=2", "--max_new_tokens=4", f"--output={tmp_path / 'out'}")
    status, report, error = command(*decoding)
    assert (status, report["prompts"], report["differing"]) == (0, 2, [])
    assert "prompts to verify with: single tokens of the base's vocabulary" in error


def test_a_result_that_decodes_otherwise_is_not_kept(command, verifying, tmp_path, monkeypatch):
    """Spoil what was written, as a wrong layout would."""
    write = conversion.write_head

    def write_wrongly(staged, *rest):
        write(staged, *rest)
        edit_tensors(staged, lambda stored: stored[MLP].__imul__(-1))

    monkeypatch.setattr(conversion, "write_head", write_wrongly)
    status, report, error = command(*verifying)
    assert status == 1
    assert report["differing"]
    assert report["tau_result"] < report["tau_source"]
    assert "prompts differ, so nothing was written" in error
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
