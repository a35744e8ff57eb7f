"""Converted heads for the hub: the card, and an upload as far as the network."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from clover_jax.interchange.directory import load_draft
from clover_jax.pretrained.loading import load_base
from tests.tiny_checkpoints import copy_of, edit_json

WEIGHTS = "model.safetensors"
NAMES = ("--base_model=org/base", "--license=mit")


def test_a_card_is_prepared_and_nothing_uploaded(command, speaking, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folders = (f"--base={speaking / 'base'}", f"--input={speaking / 'head'}")
    given = (*folders, *NAMES, "--push=me/head")
    out = tmp_path / "out"
    status, report, _ = command(*given, f"--output={out}", "--card_only")
    assert (status, report["repository"], report["uploaded"]) == (0, "me/head", None)
    card = (out / "README.md").read_text()
    assert "| drafter | clover2 |" in card
    assert "generate --base=org/base --draft=me/head --prompt=" in card
    front = card.split("---")[1].splitlines()
    assert {"base_model: org/base", "license: mit", "pipeline_tag: text-generation"} <= set(front)
    assert str(speaking) not in card
    load_draft(out, load_base(str(speaking / "base")))  # a card more does no harm
    status, _, error = command(*given, f"--output={tmp_path / 'other'}")
    assert (status, "--push=me/head needs a token in the environment" in error) == (2, True)
    assert not (tmp_path / "other").exists()


def test_a_card_has_rounded_figures_and_no_paths(command, speaking, tmp_path):
    head, base = (copy_of(speaking / name, tmp_path / name) for name in ("head", "base"))
    flags = {"data": f"{tmp_path}/chats.jsonl,builtin:python"}
    edit_json(head / "draft.json", provenance={"flags": flags, "tau": 2.857142857, "steps": 3})
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A base\n")
    given = (f"--base={base}", f"--input={head}", "--push=me/head", NAMES[0], "--card_only")
    assert command(*given, f"--output={tmp_path / 'out'}")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| tau | 2.86 |\n" in card
    assert "| data | chats.jsonl, builtin:python |\n" in card
    assert "\nlicense: apache-2.0\n" in card  # the base's
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    "given, message",
    [
        ((), "is a folder that only this machine has, and the card must say which base"),
        (("--base_model=here",), "--base_model=here is no repository of the hub; give OWNER/NAME"),
        (NAMES[:1], "the card must name a license, and "),
        ((NAMES[0], "--license="), "the card must name a license, and "),
    ],
)
def test_a_card_without_base_or_license_is_refused(command, speaking, tmp_path, given, message):
    flags = (f"--base={speaking / 'base'}", f"--input={speaking / 'head'}", "--push=me/head")
    status, _, error = command(*flags, *given, f"--output={tmp_path / 'out'}", "--card_only")
    assert (status, message in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["head", "a/b/c", "me/my head", "https://hub/me/head"])
def test_what_is_no_repository_is_refused_before_anything_is_written(
    command, speaking, tmp_path, name
):
    given = (f"--base={speaking / 'base'}", f"--input={speaking / 'head'}", f"--push={name}")
    status, _, error = command(*given, f"--output={tmp_path / 'out'}", "--card_only")
    assert (status, f"--push={name} is no repository of the hub; give OWNER" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


class Hub:
    """Stands for huggingface_hub.HfApi: takes what the network would, or fails as it does."""

    def __init__(self, fails=False):
        self.fails, self.calls = fails, []

    def __call__(self, token):
        self.calls.append(("token", token))
        return self

    def create_repo(self, name, exist_ok):
        assert exist_ok
        self.calls.append(("create", name))

    def upload_folder(self, repo_id, folder_path):
        if self.fails:
            raise OfflineModeIsEnabled("Cannot reach the hub: offline mode.\nUnset it.")
        found = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append(("upload", repo_id, found))
        return "https://hub/me/head"


@pytest.fixture
def pushing(speaking, tmp_path, monkeypatch):
    """A function that makes the hub, and the flags that push to it."""
    given = {"base": speaking / "base", "input": speaking / "head", "output": tmp_path / "out"}

    def make(**options):
        hub = Hub(**options)
        monkeypatch.setattr(huggingface_hub, "HfApi", hub)
        monkeypatch.setenv("HF_TOKEN", "secret")
        flags = [f"--{name}={value}" for name, value in given.items()]
        return hub, [*flags, *NAMES, "--push=me/head"]

    return make


def test_a_folder_is_uploaded_with_its_card(command, pushing):
    hub, argv = pushing()
    status, report, error = command(*argv, "--to=clover2")
    assert (status, report["uploaded"]) == (0, "https://hub/me/head")
    files = ["README.md", "config.json", WEIGHTS]
    assert hub.calls == [("token", "secret"), ("create", "me/head"), ("upload", "me/head", files)]
    assert "secret" not in json.dumps(report) + error


def test_a_refused_upload_leaves_the_folder_ready(command, pushing, tmp_path):
    _, argv = pushing(fails=True)
    status, report, error = command(*argv)
    assert (status, report) == (2, None)
    said = error.splitlines()[-1]
    assert "me/head cannot be written on the hub (Cannot reach the hub: offline mode); " in said
    assert said.endswith("upload it by hand or repeat the command with --overwrite")
    assert (tmp_path / "out" / "README.md").is_file()
