"""Runs of several processes that are killed, and started again until they are done."""

import os
import random
import re
import signal
import subprocess
import sys
import time

from tests.conftest import REPOSITORY, WARNINGS

LAUNCH = REPOSITORY / "launch" / "local_processes"


def start(count, command, *flags):
    """Start a command of the package as several processes, or as one."""
    return subprocess.Popen(
        [LAUNCH, str(count), sys.executable, *WARNINGS, "-m", f"clover_jax.{command}", *flags],
        cwd=REPOSITORY,
        env=os.environ | {"GRACE": "60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_through_kills(kills, outputs, total, count, *command):
    """Kill a process after a number of rows, several times; return what the last run says.

    outputs: the files of rows, `total` of them in the end.
    Returns its status, stdout and stderr.
    """
    draw = random.Random(count)

    def num_rows():
        return sum(path.read_bytes().count(b"\n") for path in outputs if path.exists())

    for kill in range(kills):
        # From the start of the processes to the last rows.
        run, least = start(count, *command), kill * (total - 1) // kills + draw.randrange(2)
        numbers = re.search(r"process ids (.*)", run.stderr.readline())[1].split()
        while num_rows() < least:
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.01)

        killed = draw.randrange(count)
        os.kill(int(numbers[killed]), signal.SIGKILL)
        _, errors = run.communicate()
        assert run.returncode == 128 + signal.SIGKILL, errors
        assert f"process {killed} was killed by signal 9; ending the other" in errors
        print(f"killed process {killed} of {count} with {num_rows()} of {total} rows there")

    last = start(count, *command)
    said, errors = last.communicate()
    return last.returncode, said, errors
