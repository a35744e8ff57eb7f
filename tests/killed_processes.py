"""Runs of several processes that are killed, and started again until they are done."""

import os
import random
import re
import signal
import subprocess
import time

from tests.conftest import PYTHON, REPOSITORY

LAUNCH = REPOSITORY / "launch" / "local_processes"


def start(count, command, *flags, changes=None):
    """Start a command of the package as several processes, or as one.

    changes: Python that runs before the command, in every process.
    """
    module = f"clover_jax.{command}"
    if changes is None:
        program = ["-m", module]
    else:
        run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        program = ["-c", f"{changes}\n{run}"]
    command, pipe = [LAUNCH, str(count), *PYTHON, *program, *flags], subprocess.PIPE
    how = {"cwd": REPOSITORY, "env": os.environ | {"GRACE": "60"}, "text": True}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, **how)


def lines_in(*files):
    """Return a function that counts the rows in these files."""
    return lambda: sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def run_through_kills(kills, num_done, total, count, *command, changes=None):
    """Kill a process after a number of rows, several times; return what the last run says.

    num_done: a function that counts what is written so far, rows or files, `total` in the end.
    changes: as `start` has it.
    Returns its status, stdout and stderr.
    """
    draw = random.Random(count)

    for kill in range(kills):
        # From the start of the processes to the last rows.
        run = start(count, *command, changes=changes)
        least = kill * (total - 1) // kills + draw.randrange(2)
        numbers = re.search(r"process ids (.*)", run.stderr.readline())[1].split()
        while num_done() < least:
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.01)

        killed = draw.randrange(count)
        os.kill(int(numbers[killed]), signal.SIGKILL)
        _, errors = run.communicate()
        assert run.returncode == 128 + signal.SIGKILL, errors
        assert f"process {killed} was killed by signal 9; the others end too" in errors
        print(f"killed process {killed} of {count} with {num_done()} of {total} written")

    last = start(count, *command, changes=changes)
    said, errors = last.communicate()
    return last.returncode, said, errors
