"""What every test of the generate command shares, and a list of the programs that ran."""

import json
from typing import Any, NamedTuple

import jax
import pytest

from clover_jax import generate
from clover_jax.data.tokenizer import load_tokenizer
from tests.conftest import rows_in, run_command
from tests.tiny_folders import save_tiny_base, save_tiny_draft


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def draft(base):
    return save_tiny_draft(base.parent / "draft", base)


@pytest.fixture(scope="module")
def tokenizer(base):
    return load_tokenizer(base)


@pytest.fixture
def command(base, capsys):
    """Run the command in this process: (status, lines of stdout, stderr)."""

    return lambda *argv, base=base: run_command(capsys, generate, f"--base={base}", *argv)


@pytest.fixture
def prompts_file(tmp_path):
    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def decode(command, prompts_file, tmp_path):
    """Decode rows into a file: (status, output rows)."""

    def run(rows, *argv, name="out.jsonl", **options):
        output = tmp_path / name
        arguments = (f"--prompts={prompts_file(*rows)}", f"--output={output}", "--overwrite")
        arguments += ("--batch_size=2", "--max_new_tokens=20")
        status, _, error = command(*arguments, *argv, **options)
        assert status in (0, 1), error
        return status, rows_in(output)

    return run


class Chunk(NamedTuple):
    """A call of a program: what made it, from which config, for a state of which structure."""

    maker: str
    config: Any
    state: Any


@pytest.fixture
def chunks(monkeypatch, fresh_programs):
    """Every chunk of steps that ran, in order."""
    from clover_jax.decoding import programs

    ran = []

    def note(name):
        real = getattr(programs, name)

        def compiled(config, *rest):
            program = real(config, *rest)

            def call(weights, state, *arguments):
                ran.append(Chunk(name, config, jax.tree.structure(state)))
                return program(weights, state, *arguments)

            return call

        monkeypatch.setattr(programs, name, compiled)

    note("compile_chunk")
    note("compile_masked_step")
    return ran
