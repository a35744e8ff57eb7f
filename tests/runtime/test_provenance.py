"""What a draft says of the program that made it."""

import shutil
import subprocess

import pytest

import clover_jax
from clover_jax.runtime.provenance import git_revision


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_revision_is_that_of_this_programs_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        me = ("-c", "user.name=me", "-c", "user.email=me@here")
        command = ["git", "-C", str(tmp_path), *me, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / ".venv" / "clover_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(clover_jax, "__file__", str(package / "__init__.py"))
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=somebody else's")
    assert git_revision() is None
    git("add", ".venv")
    git("commit", "--quiet", "--message=ours")
    assert git_revision() == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert git_revision() == git("rev-parse", "HEAD") + "+"
