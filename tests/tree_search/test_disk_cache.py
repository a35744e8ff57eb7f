"""Measurements on disk are used again under the same key, and under no other."""

import pytest

from clover_jax.tree_search.disk_cache import remembered


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_measurement_is_made_once_for_each_key():
    made = []

    def measure():
        made.append(1)
        return {"seconds": len(made)}

    for _ in range(2):
        assert remembered("costs", {"batch": 1}, measure) == {"seconds": 1}
    assert remembered("costs", {"batch": 2}, measure) == {"seconds": 2}


def test_a_damaged_file_in_the_user_s_cache_of_this_host_is_measured_anew(cache):
    remembered("costs", {}, lambda: {"seconds": 1})
    (file,) = cache.glob("clover_jax/measurements/*/*.json")
    file.write_text("{torn")
    assert remembered("costs", {}, lambda: {"seconds": 2}) == {"seconds": 2}
