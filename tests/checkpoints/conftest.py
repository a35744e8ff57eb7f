"""The reference base, for tests of how bases are read."""

import pytest

from tests.tiny_checkpoints import copy_of


@pytest.fixture
def reference_dir(fixtures_dir):
    return fixtures_dir / "clover2_reference" / "base"


@pytest.fixture
def folder(reference_dir, tmp_path):
    """A copy of the reference base that a test may spoil."""
    return copy_of(reference_dir, tmp_path / "base")
