"""Each way to spoil a head is said in one line, and nothing is left behind."""

from pathlib import Path

import pytest

from clover_jax.conversion import conversion
from clover_jax.conversion.options import ConvertOptions
from clover_jax.loading.spec import ModelSpec
from tests.conversion.corrupt_archives import TORCH
from tests.conversion.corrupt_drafts import NATIVE
from tests.conversion.corrupt_heads import CLOVER2, SPECULATORS
from tests.tiny_checkpoints import copy_of


def assert_refused(command, folder, head, base, corruption):
    """Convert a spoilt copy of a head and its base in `folder`."""
    spoil, message = corruption
    copy_of(head, folder / "head")
    copy_of(base, folder / "base")
    spoil(folder)
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
def test_a_spoilt_clover2_head(command, reference, tmp_path, corruption):
    assert_refused(
        command, tmp_path, reference / "clover2", reference / "base", CLOVER2[corruption]
    )


@pytest.fixture(scope="module")
def speculators(fixtures_dir, tmp_path_factory):
    """An EAGLE-3 head as vLLM's speculators describe it, and its base."""
    reference, folder = fixtures_dir / "eagle3_reference", tmp_path_factory.mktemp("speculators")
    copy_of(reference / "base", folder / "base")
    spec, source = ModelSpec(str(folder / "base")), str(reference / "eagle3")
    conversion.convert(ConvertOptions(spec, source, str(folder / "head"), to="speculators"))
    return folder


@pytest.mark.parametrize("corruption", SPECULATORS)
def test_a_spoilt_speculators_head(command, speculators, tmp_path, corruption):
    assert_refused(
        command, tmp_path, speculators / "head", speculators / "base", SPECULATORS[corruption]
    )


@pytest.mark.parity
@pytest.mark.parametrize("corruption", TORCH)
def test_a_spoilt_archive(command, reference, tmp_path, monkeypatch, corruption):
    monkeypatch.chdir(tmp_path)
    assert_refused(command, tmp_path, reference / "clover2", reference / "base", TORCH[corruption])


@pytest.mark.parametrize("corruption", NATIVE)
def test_a_spoilt_draft_directory(command, speaking, tmp_path, corruption):
    assert_refused(command, tmp_path, speaking / "head", speaking / "base", NATIVE[corruption])
