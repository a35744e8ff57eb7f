"""What every test shares: where the fixtures are, and the environment that JAX starts in.

Tests see one CPU device. A test that needs several, or flags that JAX reads only once, runs its
code in a fresh process by `run_python`:

    def test_two_devices(run_python):
        run_python("import jax; assert len(jax.devices()) == 2", devices=2)
"""

import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# JAX reads these when it is imported, which is after this file; subprocesses inherit them.
if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set its environment")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Most of the suite's time is compilation: keep every program for the next run, for each machine its
# own, since XLA compiles for the very CPU.
CACHE = REPOSITORY / ".cache" / "jax" / platform.node()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
MAPS = Path("/proc/self/maps")
# One thread for torch in each of several test processes; more only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same filters as in setup.cfg.
WARNINGS = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")
PYTHON = (sys.executable, *WARNINGS)


def pytest_configure(config: pytest.Config) -> None:
    # Compiling with LLVM's optimizations takes longer than they save in programs so small. Tests
    # that are asked for by their mark measure times, or what a compiler makes of a program.
    if config.option.markexpr.startswith("not slow"):
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
            _compile_quickly()
            # Where one folder is asked for, its conftest.py has imported JAX by now.
            if "jax" in sys.modules:
                sys.modules["jax"].config.update("jax_disable_most_optimizations", True)


def pytest_collection_finish() -> None:
    # What was imported and collected stays: to walk it at every collection of garbage, and to
    # collect as often as by default, took a twentieth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _compile_quickly() -> None:
    """Let XLA take less processor time for a program, where it knows the flags.

    Cut in no parts to compile side by side a program takes 0.9 of the time, and fewer memory maps.
    Emitting loops as before its fusion emitters, which XLA could up to jaxlib 0.10, takes 0.6. It
    does not start with a flag that it does not know.
    """
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    given = os.environ.get("XLA_FLAGS", "")
    added = [flag for flag in flags if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder of small generated test data, with the scripts that made it."""
    return REPOSITORY / "tests" / "fixtures"


@pytest.fixture(autouse=True, scope="module")
def bounded_programs() -> Iterator[None]:
    """Forget all programs before a test process has more memory maps than Linux allows: 65 530.

    Each program takes four or more. Where no more can be had, XLA ends the process.
    """
    yield
    if not MAPS.exists() or len(MAPS.read_bytes().splitlines()) < 30_000:
        return
    import jax

    from clover_jax.decoding.programs import compile_programs

    compile_programs.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Keep programs that a test has patched from other tests, and theirs from it."""
    from clover_jax.decoding.programs import compile_programs

    compile_programs.cache_clear()
    yield
    compile_programs.cache_clear()


@pytest.fixture(params=["in a loop", "by calls"])
def way(request, monkeypatch, fresh_programs) -> str:
    """How a program runs again and again: as on CPU, and as on an accelerator."""
    from clover_jax.decoding import programs
    from clover_jax.evaluation import parts

    for module in (programs, parts):
        monkeypatch.setattr(module, "loops_on_device", lambda: request.param == "in a loop")
    return request.param


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """A function that runs Python source in a fresh process and returns its stdout."""

    def run(source: str, *arguments: str, devices: int = 1) -> str:
        return run_program(*PYTHON, "-c", source, *arguments, **devices_flag(devices)).stdout

    return run


def devices_flag(devices: int) -> dict[str, str]:
    """Return the variable that gives a process this many CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip()}


def run_program(*command, status=0, env=None, cwd=REPOSITORY, **variables):
    """Run a program with additional environment variables; return the finished process.

    status: the exit status that it must have, None for any. env: in place of this process's.
    """
    env = (os.environ if env is None else env) | variables
    ran = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert status in (None, ran.returncode), (ran.returncode, ran.stderr)
    return ran


def run_command(capsys, command, *argv):
    """Run a command of the package in this process: (status, lines of stdout, stderr)."""
    from clover_jax import cli

    capsys.readouterr()
    status = cli.run(command.main, command.define_flags, [*map(str, argv)])
    printed = capsys.readouterr()
    return status, printed.out.splitlines(), printed.err


def rows_in(path: Path) -> list[dict]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("CLOVER_JAX_PARITY") == "required":  # as launch/check says
            raise pytest.UsageError("torch is not installed, and the parity tests must run")
        missing = pytest.mark.skip(reason="torch is not installed: pip install -e .[parity]")
        for item in items:
            if item.get_closest_marker("parity"):
                item.add_marker(missing)
