"""Real processes that read activations as one: the folder is that of one."""

import pytest

from tests.killed_processes import start
from tests.preparation.prepared_data import FLAGS


@pytest.fixture
def prepare(base, data, tmp_path):
    """A function that gives the command of preparing the same texts into a folder."""
    # At least two rows a device: the product of one alone rounds otherwise.
    flags = {"base": base, "data": data} | FLAGS | {"batch_size": 8}
    given = [f"--{name}={value}" for name, value in flags.items()]
    return lambda output, *argv: ("prepare", *given, f"--output={tmp_path / output}", *argv)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("count, flags", [(2, []), (4, ["--mesh=data=2,fsdp=2"])])
def test_processes_write_the_folder_of_one(prepare, tmp_path, count, flags):
    for processes, command in [(1, prepare("one")), (count, prepare("ours", *flags))]:
        run = start(processes, *command)
        said, errors = run.communicate()
        assert run.returncode == 0, errors
        assert said.count("train with --data=") == 1
    assert contents(tmp_path / "ours") == contents(tmp_path / "one")
    # Again, with nothing left to do.
    again = start(count, *prepare("ours", *flags))
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert contents(tmp_path / "ours") == contents(tmp_path / "one")


@pytest.mark.slow
def test_several_processes_do_not_only_tokenise(prepare):
    refused = start(2, *prepare("out", "--features=none"))
    _, errors = refused.communicate()
    assert refused.returncode == 2, errors
    assert "2 processes run a base for --regenerate or --features" in errors
