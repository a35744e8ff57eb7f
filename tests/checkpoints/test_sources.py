"""A source is a folder, a built-in base or a repository of the hub; else the user is told."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from clover_jax.checkpoints.sources import HUB_PATTERNS, find_directory
from clover_jax.errors import UserError


@pytest.fixture
def hub(monkeypatch):
    """A hub that records what is asked for and fails as it does without a network."""
    asked = []
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def snapshot_download(repository, **options):
        asked.append((repository, options))
        raise LocalEntryNotFoundError("Cannot reach the hub.\nCheck your connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch, hub):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_directory("owner/name").samefile(tmp_path / "owner" / "name")
    assert hub == []


def test_a_hub_id_offline_says_how_to_go_on(hub):
    message = (
        r"^the folder owner/name does not exist, and no repository of this name can be fetched "
        r"from the hub \(the hub cannot be reached and its cache has no copy\)$"
    )
    with pytest.raises(UserError, match=message):
        find_directory("owner/name")
    asked = {"revision": None, "allow_patterns": list(HUB_PATTERNS), "token": False}
    assert hub == [("owner/name", asked)]


def test_a_mistyped_path_is_not_looked_up_on_the_hub_and_close_names_are_listed(
    tmp_path, monkeypatch, hub
):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for source, close in {
        "runs/mein": "runs/mine",
        "./run/mine": "runs/mine",
        f"{tmp_path}/runz/mine": f"{tmp_path}/runs/mine",
        "runs/mine/best/draft": None,
        "a/b/c": None,
    }.items():
        with pytest.raises(UserError) as error:
            find_directory(source)
        names = f" (close names: {close})" if close else ""
        assert str(error.value) == f"the folder {source} does not exist{names}"
    assert hub == []
    # This may be a repository, so both failures are reported.
    with pytest.raises(UserError, match=r"run/mine does not exist \(close names: runs/mine\), and"):
        find_directory("run/mine")
    with pytest.raises(UserError, match=r"'run' is neither a folder \(close names: runs\), nor a"):
        find_directory("run")


def test_a_token_comes_from_the_environment_only(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(UserError, match="can be fetched from the hub"):
        find_directory("owner/name")
    assert hub[0][1]["token"] == "secret"


def test_a_hub_id_may_name_a_revision(hub):
    with pytest.raises(UserError, match="owner/name@v1.0"):
        find_directory("owner/name@v1.0")
    assert hub[0][0] == "owner/name"
    assert hub[0][1]["revision"] == "v1.0"


def test_a_failure_without_words_is_named_by_its_kind(hub, monkeypatch):
    def fail(repository, **options):
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"can be fetched from the hub \(TimeoutError\)"):
        find_directory("owner/name")


REPOSITORIES = {
    "base": (
        ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"],
        ["pytorch_model.bin", "original/consolidated.00.pth", "README.md"],
    ),
    "old head": (["config.json", "pytorch_model.bin"], ["training_args.bin"]),
    "draft": (["draft.json", "params/d/0", "params/ocdbt.process_0/d/1"], ["LICENSE"]),
    "workdir": (
        ["best/draft.json", "best/params/d/0", "draft/draft.json", "draft/params/manifest.ocdbt"],
        ["checkpoints/2/state/d/0", "metrics.jsonl", "tensorboard/events"],
    ),
    "medusa": (["config.json", "medusa_lm_head.pt"], []),
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_what_is_fetched_of_a_repository(monkeypatch, tmp_path, name):
    """What is read, as the hub's own filter selects it, and nothing else."""
    wanted, others = REPOSITORIES[name]

    def snapshot_download(repository, allow_patterns, **options):
        for path in filter_repo_objects(wanted + others, allow_patterns=allow_patterns):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_directory("owner/name") == tmp_path
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == sorted(wanted)


@pytest.mark.parametrize(
    "source, message",
    [
        ("builtin:huge", "there is no built-in base 'huge'; the built-in base is builtin:tiny"),
        ("builtin:../models", "there is no built-in base '../models'"),
        (
            "nowhere",
            "'nowhere' is neither a folder, nor a hub id like owner/name, nor built",
        ),
        ("/no/such/place", "the folder /no/such/place does not exist"),
        ("./place", "the folder ./place does not exist"),
        ("../place", "the folder ../place does not exist"),
    ],
)
def test_what_is_nowhere_is_refused(source, message, hub):
    with pytest.raises(UserError, match=message):
        find_directory(source)
    assert hub == []


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UserError, match="is a file; pass the folder that holds config.json"):
        find_directory(str(path))
