import os
import subprocess
import sys

from clover_jax.cli.command import use_compilation_cache


def test_what_jax_was_told_stands():
    environment = {"JAX_COMPILATION_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/cache"}
    before = dict(environment)
    use_compilation_cache(environment)
    assert environment == before


def test_programs_lie_under_the_users_cache_folder_host_by_host():
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
    environment |= {
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-W", "error", "-c", source]
    found = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert found == ["False\n", "True\n"]
