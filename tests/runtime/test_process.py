"""What a process keeps and says: compiled programs, freed memory, the revision of its source."""

import os
import platform
import shutil

import pytest

import clover_jax
from clover_jax.runtime.compilation_cache import use_compilation_cache
from clover_jax.runtime.provenance import git_revision
from tests.conftest import PYTHON, run_program


def test_programs_lie_under_the_users_cache_folder_unless_jax_was_told_another():
    environment = {"JAX_COMPILATION_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/cache"}
    before = dict(environment)
    use_compilation_cache(environment)
    assert environment == before
    environment = {"XDG_CACHE_HOME": "/cache"}
    use_compilation_cache(environment)
    assert environment["JAX_COMPILATION_CACHE_DIR"].startswith("/cache/clover_jax/programs/")


def test_a_second_process_finds_the_first_ones_programs(tmp_path):
    source = (
        "from clover_jax.runtime.compilation_cache import use_compilation_cache\n"
        "use_compilation_cache()\n"
        "import jax, jax.numpy as jnp\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda e, **_: hits.append(e))\n"
        "jax.jit(lambda x: jnp.sin(x @ x).sum())(jnp.ones((64, 64))).block_until_ready()\n"
        "print('/jax/compilation_cache/cache_hits' in hits)\n"
    )
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = [run_program(*PYTHON, "-c", source, env=environment).stdout for _ in range(2)]
    assert found == ["False\n", "True\n"]


# Prints how many pages a block took the first time, and when it was allocated again.
ALLOCATE_TWICE = """
import resource
from clover_jax.runtime.device_memory import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(2**28)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep it anyway")
def test_freed_memory_is_used_again():
    first, second = map(int, run_program(*PYTHON, "-c", ALLOCATE_TWICE).stdout.split())
    assert second < first / 10


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_revision_is_that_of_this_programs_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        me = ("-c", "user.name=me", "-c", "user.email=me@here")
        command = ["git", "-C", str(tmp_path), *me, *arguments]
        return run_program(*command).stdout.strip()

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
