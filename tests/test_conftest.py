"""The environment of the tests themselves."""

import warnings

import jax
import pytest


def test_matmuls_are_exact_and_programs_are_kept():
    assert jax.config.jax_default_matmul_precision == "highest"
    assert jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1


def test_a_warning_is_an_error():
    with pytest.raises(DeprecationWarning, match="old"):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_a_fresh_process_has_the_devices_asked_for_and_a_failure_shows_its_traceback(run_python):
    source = "import sys, jax; print(len(jax.devices()), *sys.argv[1:])"
    assert run_python(source, "a", devices=3) == "3 a\n"
    with pytest.raises(AssertionError, match="ValueError: inside"):
        run_python("raise ValueError('inside')")
