"""Tests of the memory that a CPU's process keeps."""

import platform
import subprocess
import sys

import pytest

# Prints how many pages a block took the first time, and when it was allocated again.
ALLOCATE_TWICE = """
import resource
from clover_jax.runtime.device_memory import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(2**28)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep it anyway")
def test_freed_memory_is_used_again():
    ran = subprocess.run(
        [sys.executable, "-c", ALLOCATE_TWICE], capture_output=True, text=True, check=True
    )
    first, second = map(int, ran.stdout.split())
    assert second < first / 10
