"""Reading the compiler's assignment of buffers."""

import re

import pytest

from experiments.aot.buffers import Temporaries, read_temporaries

# As a TPU's compiler writes it: a parameter, temporaries in main memory, and some in fast memory.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 1048576, parameter 0, shape |f32[512,512]| at ShapeIndex {}:
 value: <1 p @0> (size=1048576,offset=0): f32[512,512]{1,0}
allocation 1: size 32768, preallocated-temp:
 value: <2 add.1 @0> (size=512,offset=0): s32[]{:T(128)}
 value: <3 copy.2{0} @0> (size=4096,offset=16384): bf16[16,128]{1,0}
 value: <4 fusion.3 @0> (size=8192,offset=16384): bf16[32,128]{1,0}
allocation 2: size 65536, color 1, preallocated-temp:
 value: <5 fusion.4 @1> (size=65536,offset=0): bf16[256,128]{1,0:S(1)}
"""


@pytest.mark.parametrize("page", ["", ", page 0"], ids=["jax 0.10", "jax 0.12"])
def test_values_in_main_memory_count_once_where_they_share_room(page, tmp_path):
    text = re.sub(r"^(allocation .*: size \d+)", rf"\1{page}", ASSIGNMENT, flags=re.MULTILINE)
    (tmp_path / "module_0.step.after_optimizations-buffer-assignment.txt").write_text(text)
    (tmp_path / "module_0.step.after_optimizations.txt").write_text("HloModule step")
    assert read_temporaries(tmp_path / "other") is None
    assert read_temporaries(tmp_path) == Temporaries(allocated=32768, filled=512 + 8192)
