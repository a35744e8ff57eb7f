"""Each way to spoil a head is said in one line, and nothing is left behind."""

from pathlib import Path

import pytest

from clover_jax.interchange import conversion
from tests.convert.corrupt_archives import TORCH
from tests.convert.corrupt_drafts import NATIVE
from tests.convert.corrupt_heads import CLOVER2, SPECULATORS
from tests.tiny_checkpoints import copy_of


def assert_refused(command, folder, message):
    before = sorted(path.name for path in folder.iterdir())
    argv = (f"--base={folder / 'base'}", f"--input={folder / 'head'}", f"--output={folder / 'out'}")
    status, report, error = command(*argv)
    assert (status, report) == (2, None)
    assert error.startswith("clover_jax.convert: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not Path("was_executed").exists()


@pytest.mark.parametrize("corruption", CLOVER2)
def test_a_spoilt_clover2_head(command, reference, tmp_path, monkeypatch, corruption):
    spoil, message = CLOVER2[corruption]
    copy_of(reference / "clover2", tmp_path / "head")
    copy_of(reference / "base", tmp_path / "base")
    spoil(tmp_path)
    assert_refused(command, tmp_path, message)


@pytest.fixture(scope="module")
def speculators(fixtures_dir, tmp_path_factory):
    """An EAGLE-3 head as vLLM's speculators describe it, and its base."""
    reference, folder = fixtures_dir / "eagle3_reference", tmp_path_factory.mktemp("speculators")
    copy_of(reference / "base", folder / "base")
    given = {"input": reference / "eagle3", "output": folder / "head", "base": folder / "base"}
    conversion.convert(
        conversion.ConvertOptions(**{k: str(v) for k, v in given.items()}, to="speculators")
    )
    return folder


@pytest.mark.parametrize("corruption", SPECULATORS)
def test_a_spoilt_speculators_head(command, speculators, tmp_path, corruption):
    spoil, message = SPECULATORS[corruption]
    copy_of(speculators / "head", tmp_path / "head")
    copy_of(speculators / "base", tmp_path / "base")
    spoil(tmp_path)
    assert_refused(command, tmp_path, message)


@pytest.mark.parity
@pytest.mark.parametrize("corruption", TORCH)
def test_a_spoilt_archive(command, reference, tmp_path, monkeypatch, corruption):
    spoil, message = TORCH[corruption]
    copy_of(reference / "clover2", tmp_path / "head")
    copy_of(reference / "base", tmp_path / "base")
    spoil(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(command, tmp_path, message)


@pytest.mark.parametrize("corruption", NATIVE)
def test_a_spoilt_draft_directory(command, speaking, tmp_path, corruption):
    spoil, message = NATIVE[corruption]
    copy_of(speaking / "head", tmp_path / "head")
    copy_of(speaking / "base", tmp_path / "base")
    spoil(tmp_path)
    assert_refused(command, tmp_path, message)
