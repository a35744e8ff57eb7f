"""A run of `prepare` that was killed, and one that is repeated."""

import json
import signal
import subprocess
import sys

import pytest

from clover_jax.errors import UserError
from tests.conftest import REPOSITORY, WARNINGS
from tests.prepare.prepared_data import FLAGS, assert_same_samples, load


@pytest.mark.parametrize(
    "writes",
    [
        pytest.param(3, id="in the samples"),
        pytest.param(9, id="in the activations", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_where_it_was(command, base, data, prepared, tmp_path, writes):
    source = (
        "import os, sys; from clover_jax import cli, prepare\n"
        "from clover_jax.data import prepared as shards\n"
        "from clover_jax.training import features, prepare_run as run\n"
        "features.SHARD_BYTES, run.SHARD_BYTES = 40_000, 4_000\n"
        "write, left = shards.ShardWriter.write, [int(sys.argv[1])]\n"
        "def killing(writer, *rest, **facts):\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "    left[0] -= 1; write(writer, *rest, **facts)\n"
        "shards.ShardWriter.write = killing\n"
        "sys.exit(cli.run(prepare.main, prepare.define_flags, sys.argv[2:]))\n"
    )
    flags = {"base": base, "data": data, "output": tmp_path} | FLAGS
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    killed = subprocess.run(
        [sys.executable, *WARNINGS, "-c", source, str(writes), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(list(tmp_path.glob("*.array_record"))) == writes
    with pytest.raises(UserError, match="not complete|has no cached activations"):
        load(str(tmp_path), base, ("pre_norm",))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.array_record")}
    status, _, err = command(**flags)
    assert status == 0, err
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in kept}.items()
    assert_same_samples(tmp_path, prepared)


def test_a_finished_folder_is_left_alone_and_another_command_refused(command, base, data, prepared):
    flags = {"base": base, "data": data, "output": prepared} | FLAGS
    before = {path: path.stat().st_mtime_ns for path in prepared.glob("*.array_record")}
    status, out, _ = command(**flags)
    assert status == 0
    assert json.loads(out.splitlines()[-1])["features"] == ["pre_norm"]
    assert {path: path.stat().st_mtime_ns for path in prepared.glob("*.array_record")} == before
    status, out, err = command(**(flags | {"feature_dtype": "bfloat16"}))
    assert (status, out) == (2, "")
    assert "another dtype ('float32', not 'bfloat16')" in err
