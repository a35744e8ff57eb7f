import contextlib
import threading

import grain
import jax.numpy as jnp
import pytest

from clover_jax.errors import UserError
from clover_jax.runtime.checkpoint import Checkpoints
from tests.conftest import PYTHON, run_program

STATE = {"x": jnp.arange(3)}


@contextlib.contextmanager
def opened(folder):
    """Yield the checkpoints of a folder, and batches whose position they keep."""
    dataset = grain.MapDataset.range(3).to_iter_dataset()
    with (
        contextlib.closing(Checkpoints(folder)) as checkpoints,
        contextlib.closing(iter(dataset)) as batches,
    ):
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
        with (
            opened(tmp_path) as (checkpoints, batches),
            pytest.raises(UserError, match="every checkpoint under .* is damaged"),
        ):
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
