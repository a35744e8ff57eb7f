"""Real processes that read activations as one: the folder is that of one."""

import pytest

from tests.killed_processes import run_through_kills, start
from tests.prepare.prepared_data import FLAGS, assert_same_samples


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


SMALL_SHARDS = (
    "from clover_jax.training import features, prepare_run as run\n"
    "features.SHARD_BYTES, run.SHARD_BYTES = 40_000, 4_000\n"
)


@pytest.mark.slow
def test_processes_that_are_killed_at_random_write_the_activations_of_one(prepare, tmp_path):
    one, ours = tmp_path / "one", tmp_path / "ours"
    alone = start(1, *prepare("one"), changes=SMALL_SHARDS)
    _, errors = alone.communicate()
    assert alone.returncode == 0, errors

    def num_shards(folder=ours):
        return len(list(folder.glob("*.array_record")))

    total = num_shards(one)
    assert total > 10
    killed = run_through_kills(10, num_shards, total, 2, *prepare("ours"), changes=SMALL_SHARDS)
    status, said, errors = killed
    assert status == 0, errors
    assert said.count("train with --data=") == 1

    # Files of the same names. After a kill a sample may lie in another row, and rounds otherwise.
    assert sorted(contents(ours)) == sorted(contents(one))
    assert_same_samples(ours, one)


@pytest.mark.slow
def test_several_processes_do_not_only_tokenise(prepare):
    refused = start(2, *prepare("out", "--features=none"))
    _, errors = refused.communicate()
    assert refused.returncode == 2, errors
    assert "2 processes run a base for --regenerate or --features" in errors
