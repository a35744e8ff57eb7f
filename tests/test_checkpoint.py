import contextlib
import threading

import grain
import jax.numpy as jnp

from clover_jax.checkpoint import Checkpoints


def test_saving_returns_while_the_files_are_still_being_written(tmp_path, monkeypatch):
    may_finish, write_hashes = threading.Event(), Checkpoints._write_hashes

    def held_back(checkpoints):
        assert may_finish.wait(300), "saving waited for its own files"
        write_hashes(checkpoints)

    monkeypatch.setattr(Checkpoints, "_write_hashes", held_back)
    dataset = grain.MapDataset.range(3).to_iter_dataset()
    with (
        contextlib.closing(Checkpoints(tmp_path)) as checkpoints,
        contextlib.closing(iter(dataset)) as batches,
    ):
        checkpoints.save(1, {"x": jnp.arange(3)}, batches)
        assert not (tmp_path / "1").exists()
        may_finish.set()
        checkpoints.wait()
        assert (tmp_path / "1").is_dir()
