"""The report of a compiled step, and when its program's text is written."""

import errno
from pathlib import Path

import jax
import pytest

from clover_jax.benchmark import compiled, compiled_report
from clover_jax.errors import UserError
from clover_jax.xla.targets import CHIPS, Target


@pytest.fixture
def compile_tiny(monkeypatch):
    """Compile a small step for this machine, its program's text to the file given."""
    monkeypatch.setattr(compiled, "find_devices", lambda target: jax.devices()[:1])

    def run(program):
        return compiled_report.compile_and_describe(
            Target("here", "cpu", CHIPS["v6e"], "1"),
            base="shape:64x1x96",
            draft="none",
            tree=None,
            dtype="float32",
            mesh=None,
            batch=1,
            context=10,
            program=str(program),
        )

    return run


@pytest.mark.parametrize("where", ["missing/step.hlo", ""])
def test_a_program_that_cannot_be_written_is_found_out_before_compiling(
    where, compile_tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(compiled_report, "compile_step", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match="--program=.* must be a file in a folder that exists"):
        compile_tiny(tmp_path / where)


def test_the_report_is_there_where_the_disk_refuses_the_program(
    compile_tiny, tmp_path, capsys, monkeypatch
):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        compile_tiny(tmp_path / "step.hlo")
    assert "bytes moved" in capsys.readouterr().out


def test_the_program_is_written(compile_tiny, tmp_path):
    compile_tiny(tmp_path / "step.hlo")
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule")
