"""What a process keeps: checkpoints of training, compiled programs, memory, its revision."""

import contextlib
import os
import platform
import shutil
import threading

import grain
import jax.numpy as jnp
import pytest

import clover_jax
from clover_jax.cli.command import use_compilation_cache
from clover_jax.errors import UserError
from clover_jax.runtime.checkpoint import Checkpoints
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
        "from clover_jax.cli.command import use_compilation_cache\n"
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


STATE = {"x": jnp.arange(3)}


@contextlib.contextmanager
def opened(folder):
    """Yield the checkpoints of a folder, and batches whose position they keep."""
    dataset = grain.MapDataset.range(3).to_iter_dataset()
    closing = contextlib.closing
    with closing(Checkpoints(folder)) as checkpoints, closing(iter(dataset)) as batches:
        yield checkpoints, batches


def test_saving_returns_while_the_files_are_still_being_written(tmp_path, monkeypatch):
    may_finish, write_hashes = threading.Event(), Checkpoints._write_hashes

    def held_back(checkpoints):
        assert may_finish.wait(300), "saving waited for its own files"
        write_hashes(checkpoints)

    monkeypatch.setattr(Checkpoints, "_write_hashes", held_back)
    with opened(tmp_path) as (checkpoints, batches):
        checkpoints.save(1, STATE, batches)
        assert not (tmp_path / "1").exists()
        may_finish.set()
        checkpoints.wait()
        assert (tmp_path / "1").is_dir()


def test_a_run_whose_checkpoints_were_all_damaged_is_never_begun_anew(tmp_path):
    with opened(tmp_path) as (checkpoints, batches):
        checkpoints.save(1, STATE, batches)
        checkpoints.wait()
    largest = max((tmp_path / "1").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"")
    for _ in range(2):  # the second time nothing is left but what was set aside
        refused = pytest.raises(UserError, match="every checkpoint under .* is damaged")
        with opened(tmp_path) as (checkpoints, batches), refused:
            checkpoints.restore(STATE, batches)
    assert (tmp_path / "damaged" / "1").is_dir()


def test_a_checkpoint_that_does_not_fit_is_not_taken_for_damaged(tmp_path, monkeypatch):
    with opened(tmp_path) as (checkpoints, batches):
        checkpoints.save(1, STATE, batches)
        checkpoints.wait()

        def full(*arguments):
            raise MemoryError("no room for it")

        with monkeypatch.context() as patched:
            patched.setattr(Checkpoints, "_restore_step", full)
            with pytest.raises(MemoryError):
                checkpoints.restore(STATE, batches)
        assert checkpoints.restore(STATE, batches)[1] == 1


# Files may not grow beyond 100 kB: many of the arrays, which are written at once, do not fit.
REFUSED = """
import contextlib, pathlib, resource, sys
import grain, jax.numpy as jnp
from clover_jax.errors import UserError
from clover_jax.runtime.checkpoint import Checkpoints

state = {f"layer_{i}": jnp.arange(100_000) * i for i in range(30)}
batches = iter(grain.MapDataset.range(3).to_iter_dataset())
with contextlib.closing(Checkpoints(pathlib.Path(sys.argv[1]))) as checkpoints:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoints.save(1, state, batches)
        checkpoints.wait()
    except UserError as error:
        print(error)
batches.close()
"""


def test_a_disk_that_refuses_many_writes_at_once_is_told_in_one_line(tmp_path):
    finished = run_program(*PYTHON, "-c", REFUSED, str(tmp_path))
    (line,) = finished.stdout.splitlines()
    assert "files may not grow that large there" in line
    assert finished.stderr == ""
