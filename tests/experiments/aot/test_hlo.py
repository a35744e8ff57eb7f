"""Reading compiled programs and buffers: small ones made here, and forms of TPU programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from clover_jax.evaluation.targets import CHIPS
from experiments.aot import costs
from experiments.aot.buffers import Temporaries, read_temporaries
from experiments.aot.costs import Live, moved_by_part, part_of, sum_by_part
from experiments.aot.hlo import Program, Sent
from experiments.aot.hlo_text import short_source

# S(1) is fast memory, and a fusion's inside is never stored.
TPU = """HloModule jit_step, is_scheduled=true

%fused (param_0.1: bf16[64,32], param_1.2: bf16[8,64]) -> bf16[8,32] {
  %param_0.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %copy.9 = bf16[64,32]{0,1:T(8,128)(2,1)} copy(%param_0.1)
  %param_1.2 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} convolution(%param_1.2, %copy.9)
}

%look_up (table: bf16[1000,64], index: s32[8]) -> bf16[8,64] {
  %index = s32[8]{0:T(128)} parameter(1)
  %table = bf16[1000,64]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather.1 = bf16[8,64]{1,0:T(8,128)(2,1)} gather(%table, %index)
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %state = (s32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %next = f32[16]{0:T(128)} negate(%state), backend_config={"estimated_cycles":"7"}
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[16]{0:T(128)}) tuple(%state, %next)
}

%below_4 (state.1: (s32[], f32[16])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[16]{0:T(128)}) parameter(0)
  %bound = s32[]{:T(128)} constant(4)
  ROOT %compare.1 = pred[]{:T(128)} compare(%state.1, %bound), direction=LT
}

%open_body (state.2: f32[16]) -> f32[16] {
  ROOT %state.2 = f32[16]{0:T(128)} parameter(0)
}

ENTRY %main.1 (weights: bf16[64,32], table: bf16[1000,64], index: s32[8], loop: f32[16]) -> bf16[8,32] {
  %weights = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %table.1 = bf16[1000,64]{1,0:T(8,128)(2,1)} parameter(1)
  %index.1 = s32[8]{0:T(128)} parameter(2)
  %loop = f32[16]{0:T(128)} parameter(3)
  %rows = bf16[8,64]{1,0:T(8,128)(2,1)} fusion(%table.1, %index.1), kind=kLoop, calls=%look_up
  %copy-start.1 = (bf16[64,32]{1,0:T(8,128)(2,1)S(1)}, bf16[64,32]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%weights)
  %copy-done.1 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %while.1 = (s32[]{:T(128)}, f32[16]{0:T(128)}) while(%loop), condition=%below_4, body=%body
  %while.2 = f32[16]{0:T(128)} while(%loop), condition=%open_body, body=%open_body
  %dot.1 = bf16[8,32]{1,0:T(8,128)(2,1)} fusion(%copy-done.1, %rows), kind=kOutput, calls=%fused, metadata={op_name="jit(step)/verify/Decoder/layers_0/mlp/dot_general"}, backend_config={"window_config":{"estimated_cycles":"120"}}
  %all-gather-start.1 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) all-gather-start(%dot.1), dimensions={0}
  %all-gather-done.1 = bf16[32,32]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %turned = bf16[32,64]{1,0:T(8,128)(2,1)} transpose(%weights), dimensions={1,0}
}
"""  # noqa: E501


def moved(program, name):
    return next(program.moved_bytes(c, i) for c, i in program.instructions() if i.name == name)


def test_only_what_is_executed_by_itself_is_listed():
    program = Program(TPU)
    found = {i.name: i for _, i in program.instructions()}
    names = "rows copy-start.1 next compare.1 dot.1 all-gather-start.1 turned"
    assert set(found) == set(names.split())
    assert (found["dot.1"].cycles, found["next"].cycles) == (120, 7)
    assert short_source(found["dot.1"].source) == "verify/Decoder/layers_0/mlp"
    assert [i.opcode for i in program.made((64, 32))] == ["transpose"]  # not the prefetch
    (gathered,) = program.collectives()
    assert str(gathered).startswith("all-gather-start bf16[32,32]")


def test_a_lookup_moves_its_rows_and_a_prefetched_weight_is_read_once():
    program = Program(TPU)
    assert moved(program, "rows") == 8 * 64 * 2 + 8 * 4 + 8 * 64 * 2
    assert moved(program, "copy-start.1") == 64 * 32 * 2
    assert moved(program, "dot.1") == 8 * 64 * 2 + 8 * 32 * 2


def test_a_loop_runs_as_often_as_its_condition_says_or_as_the_cache_has_chunks():
    loops = Program(TPU).executed
    found = {name: each.times(7) for name, each in loops.items()}
    assert found == {"main.1": 1, "body": 4, "below_4": 4, "open_body": 7}
    # Slices of a cache of 2048 positions: 1024 at a time and, in a fusion, 256.
    caches = Program("""HloModule caches

%cut (c.2: bf16[2,4,2048,8]) -> bf16[2,4,256,8] {
  %c.2 = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  ROOT %slice.2 = bf16[2,4,256,8]{3,2,1,0} dynamic-slice(%c.2), dynamic_slice_sizes={2,4,256,8}
}

%long (a: bf16[2,4,2048,8]) -> bf16[2,4,2048,8] {
  %a = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  ROOT %slice.1 = bf16[2,4,1024,8]{3,2,1,0} dynamic-slice(%a), dynamic_slice_sizes={2,4,1024,8}
}

%short (b: bf16[2,4,2048,8]) -> bf16[2,4,2048,8] {
  %b = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  ROOT %fused = bf16[2,4,256,8]{3,2,1,0} fusion(%b), kind=kLoop, calls=%cut
}

ENTRY %main (cache: bf16[2,4,2048,8]) -> bf16[2,4,2048,8] {
  %cache = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  %while.1 = bf16[2,4,2048,8]{3,2,1,0} while(%cache), condition=%none, body=%long
  ROOT %while.2 = bf16[2,4,2048,8]{3,2,1,0} while(%while.1), condition=%none, body=%short
}
""")
    turns = functools.partial(costs.cache_turns, caches, 2040)
    times = {name: found.times(turns) for name, found in caches.executed.items()}
    assert times == {"main": 1, "long": 2, "short": 8}


# The insides of fusions that read a part of an operand, or all of it.
FUSIONS = """HloModule fusions

%inner (x: f32[100,64]) -> f32[4,64] {
  %x = f32[100,64]{1,0} parameter(0)
  ROOT %slice.1 = f32[4,64]{1,0} dynamic-slice(%x), dynamic_slice_sizes={4,64}
}

%nested (x: f32[100,64]) -> f32[4,64] {
  %x = f32[100,64]{1,0} parameter(0)
  %part = f32[4,64]{1,0} fusion(%x), kind=kLoop, calls=%inner
  ROOT %negate.1 = f32[4,64]{1,0} negate(%part)
}

%rearranged (x: f32[100,64]) -> f32[4,100] {
  %x = f32[100,64]{1,0} parameter(0)
  %t = f32[64,100]{1,0} transpose(%x), dimensions={1,0}
  ROOT %cut = f32[4,100]{1,0} slice(%t), slice={[0:4], [0:100]}
}

%widened (x: f32[100,64], part: f64[1,64]) -> f32[100,64] {
  %x = f32[100,64]{1,0} parameter(0)
  %part = f64[1,64]{1,0} parameter(1)
  %wide = f64[100,64]{1,0} convert(%x)
  %updated = f64[100,64]{1,0} dynamic-update-slice(%wide, %part)
  ROOT %narrow = f32[100,64]{1,0} convert(%updated)
}

ENTRY %main (x: f32[100,64], part: f64[1,64]) -> f32[100,64] {
  %x = f32[100,64]{1,0} parameter(0)
  %part = f64[1,64]{1,0} parameter(1)
  %nests = f32[4,64]{1,0} fusion(%x), kind=kLoop, calls=%nested
  %rearranges = f32[4,100]{1,0} fusion(%x), kind=kLoop, calls=%rearranged
  ROOT %widens = f32[100,64]{1,0} fusion(%x, %part), kind=kLoop, calls=%widened
}
"""


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("nests", 2 * 4 * 64 * 4),
        ("rearranges", 2 * 4 * 100 * 4),
        ("widens", 2 * 100 * 64 * 4 + 64 * 8),  # another buffer, for which all of it is read
    ],
)
def test_a_slice_inside_a_fusion_moves_its_part(name, num_bytes):
    assert moved(Program(FUSIONS), name) == num_bytes


def test_what_is_sent_is_counted_once_however_it_is_spread():
    # A collective beside other work is spread over fusions that share its channel; one of several
    # arrays lists what is sent before what arrives.
    program = Program("""HloModule jit_step, is_scheduled=true

%begin (shard: bf16[4,64]) -> (bf16[4,64], bf16[16,64]) {
  %shard = bf16[4,64]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[16,64]{1,0} all-gather(%shard), channel_id=7, dimensions={0}
}

%end (whole: bf16[16,64]) -> bf16[16,64] {
  %whole = bf16[16,64]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,64]{1,0} all-gather(%whole), channel_id=7, dimensions={0}
}

%body (state: f32[8]) -> f32[8] {
  %state = f32[8]{0} parameter(0)
  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%state), channel_id=8, to_apply=%sum
}

%never (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  ROOT %all-reduce.2 = f32[8]{0} all-reduce(%z), channel_id=9, to_apply=%sum
}

ENTRY %main (weights: bf16[4,64], loop: f32[8]) -> f32[8] {
  %weights = bf16[4,64]{1,0} parameter(0)
  %loop = f32[8]{0} parameter(1)
  %started = (bf16[4,64]{1,0}, bf16[16,64]{1,0}) fusion(%weights), kind=kCustom, calls=%begin
  %ended = bf16[16,64]{1,0} fusion(%started), kind=kCustom, calls=%end
  %while.1 = f32[8]{0} while(%loop), condition=%none, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %all-gather-start.1 = ((bf16[4,64]{1,0}, f32[2]{0}), (bf16[16,64]{1,0}, f32[8]{0})) all-gather-start(%weights, %loop), channel_id=10, dimensions={0}
  ROOT %all-gather-done.1 = (bf16[16,64]{1,0}, f32[8]{0}) all-gather-done(%all-gather-start.1)
}
""")  # noqa: E501
    assert program.sent(trips=3) == [
        Sent("all-gather", 1, 2 * 16 * 64 + 4 * 8),
        Sent("all-gather", 1, 2 * 16 * 64),
        Sent("all-reduce", 5, 4 * 8),
    ]


def compiled(function, *shapes, **options):
    given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return Program(jax.jit(function, **options).lower(*given).compile().as_text())


def test_a_compiled_product_moves_its_operands():
    program = compiled(jnp.matmul, ((96, 64), jnp.float32), ((64, 128), jnp.float32))
    sizes = [program.moved_bytes(c, i) for c, i in program.instructions()]
    assert sum(sizes) == 4 * (96 * 64 + 64 * 128 + 96 * 128)
    assert program.largest_results(1)[0].result_bytes == 4 * 96 * 128


def test_an_update_in_place_moves_its_rows_and_a_roll_makes_the_buffer_anew():
    def update(buffer, row, at):
        return jax.lax.dynamic_update_slice(buffer, row, (at, 0))

    shapes = ((500, 64), jnp.float32), ((1, 64), jnp.float32), ((), jnp.int32)
    program = compiled(update, *shapes, donate_argnums=0)
    assert program.made((500, 64)) == []
    assert sum(program.moved_bytes(c, i) for c, i in program.instructions()) < 500 * 64 * 4 / 10
    assert sum(program.written_bytes(c, i) for c, i in program.instructions()) == 64 * 4

    def careless(cache):
        return jax.lax.fori_loop(0, 4, lambda i, c: jnp.roll(c, 1, axis=2) + c, cache)

    rolled = compiled(careless, ((3, 2, 768, 8), jnp.float32), donate_argnums=0)
    assert rolled.made((3, 2, 768, 8))


def test_an_instruction_without_scope_belongs_to_the_first_part_that_uses_it():
    program = Program("""HloModule jit_step

ENTRY %main (weights: bf16[64,32], x: bf16[8,64]) -> bf16[8,32] {
  %weights = bf16[64,32]{1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %split = f32[2,8,32]{2,1,0} custom-call(%x, %weights)
  %drafted = bf16[8,32]{1,0} add(%split, %split), metadata={op_name="jit(step)/draft/add"}
  %prefetch = bf16[64,32]{1,0} copy(%weights)
  %through = bf16[64,32]{1,0} bitcast(%prefetch)
  %verified = bf16[8,32]{1,0} dot(%drafted, %through), metadata={op_name="jit(step)/verify/dot"}
  %again = bf16[8,32]{1,0} dot(%verified, %through), metadata={op_name="jit(step)/accept/dot"}
  ROOT %stray = bf16[8,32]{1,0} negate(%again)
}
""")
    parts = part_of(program, "main")
    assert parts["split"] == "draft"
    assert parts["prefetch"] == parts["through"] == "verify"
    found = sum_by_part(program, program.moved_bytes)
    assert list(found) == ["draft", "verify", "accept", "other"]
    assert sum(found.values()) == sum(program.moved_bytes(*i) for i in program.instructions())
    # The divided product reads both operands and writes float32 parts, which the sum reads twice.
    product, addition = 8 * 64 * 2 + 64 * 32 * 2 + 2 * 8 * 32 * 4, 2 * 2 * 8 * 32 * 4 + 8 * 32 * 2
    assert found["draft"] == product + addition


def test_a_prefetch_for_the_next_call_counts_once_and_for_its_user():
    # A weight stays in fast memory from one call to the next: another operand takes its place
    # meanwhile, so the end of the program brings it back.
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (weights: bf16[64,32], x: bf16[8,64]) -> bf16[8,32] {
  %weights = bf16[64,32]{1,0} parameter(0)
  %copy-start = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%weights), cross_program_prefetch_index=0
  %x = bf16[8,64]{1,0} parameter(1)
  %copy-done = bf16[64,32]{1,0:S(1)} copy-done(%copy-start)
  %drafted = bf16[8,32]{1,0} dot(%x, %copy-done), metadata={op_name="jit(step)/draft/dot"}
  %copy-start.1 = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%weights)
  %copy-done.1 = bf16[64,32]{1,0:S(1)} copy-done(%copy-start.1)
  ROOT %result = bf16[8,32]{1,0} copy(%drafted), metadata={op_name="jit(step)/draft/copy"}
}
"""  # noqa: E501
    program = Program(text)
    weights, rows, results = 2 * 64 * 32, 2 * 8 * 64, 3 * 2 * 8 * 32
    assert sum_by_part(program, program.moved_bytes) == {"draft": weights + rows + results}
    # Used again in the same call it counts twice.
    used = Program(text.replace("copy(%drafted)", "dot(%x, %copy-done.1)"))
    assert "copy-start.1" in [i.name for _, i in used.instructions()]


def test_a_kernel_counts_what_it_declares_and_the_live_part_of_the_cache():
    program, live = (
        Program("""HloModule jit_step, is_scheduled=true

ENTRY %main.1 (query: bf16[2,4,10,128], key: bf16[2,4,1000,128]) -> f32[2,4,10,128] {
  %query = bf16[2,4,10,128]{3,2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %key = bf16[2,4,1000,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %read_cache.1 = f32[2,4,10,128]{3,2,1,0:T(8,128)} custom-call(%query, %key), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/verify/read_cache/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"4096000","transcendentals":"80000","bytes_accessed":"2109440","remote_bytes_transferred":"0"}}}
}
"""),  # noqa: E501
        Live(share=0.25, positions=1000),
    )
    _, kernel = next(program.instructions())
    assert kernel.declared == (4096000, 2109440)
    written, cache = 4 * 2 * 4 * 10 * 128, 2 * 2 * 4 * 1000 * 128
    assert moved_by_part(program, 1, live) == {"verify": written + cache / 4}
    # Whichever takes longer: at this rate the products.
    chip = dataclasses.replace(CHIPS["v6e"], bandwidth=1e15, matrix_rate=4096)
    assert costs.kernel_seconds(program, chip, 1, live) == {"verify": 250.0}


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
