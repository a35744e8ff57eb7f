"""Measurements on disk are used again under the same key, and under no other."""

from pathlib import Path

from clover_jax.tree_search.disk_cache import cache_folder, remembered


def test_a_measurement_is_made_once_for_each_key(tmp_path):
    made = []

    def measure():
        made.append(1)
        return {"seconds": len(made)}

    for _ in range(2):
        assert remembered("costs", {"batch": 1}, measure, tmp_path) == {"seconds": 1}
    assert remembered("costs", {"batch": 2}, measure, tmp_path) == {"seconds": 2}


def test_a_damaged_file_is_measured_anew(tmp_path):
    remembered("costs", {}, lambda: {"seconds": 1}, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{torn")
    assert remembered("costs", {}, lambda: {"seconds": 2}, tmp_path) == {"seconds": 2}


def test_the_folder_is_the_user_s_cache_of_this_host():
    folder = cache_folder({"XDG_CACHE_HOME": "/tmp/cache"})
    assert folder.parents[1] == Path("/tmp/cache/clover_jax")
