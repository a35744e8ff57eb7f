"""Reading compiled programs: small ones made here, and the forms that TPU programs come in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from clover_jax.xla.hlo import Program, Sent
from clover_jax.xla.hlo_text import short_source
from clover_jax.xla.program_costs import (
    Live,
    cache_turns,
    kernel_seconds,
    moved_by_part,
    part_of,
    sum_by_part,
)
from clover_jax.xla.targets import CHIPS

# What matters of a program for TPU: S(1) is fast memory, a fusion's inside is never stored.
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


NESTED = """HloModule jit_read

%inner (buffer: f32[100,64], at: s32[]) -> f32[4,64] {
  %at = s32[] parameter(1)
  %buffer = f32[100,64]{1,0} parameter(0)
  ROOT %dynamic-slice.1 = f32[4,64]{1,0} dynamic-slice(%buffer, %at, %at)
}

%outer (at.1: s32[], buffer.1: f32[100,64]) -> f32[4,64] {
  %at.1 = s32[] parameter(0)
  %buffer.1 = f32[100,64]{1,0} parameter(1)
  %part = f32[4,64]{1,0} fusion(%buffer.1, %at.1), kind=kLoop, calls=%inner
  ROOT %negate.1 = f32[4,64]{1,0} negate(%part)
}

ENTRY %main (at.2: s32[], buffer.2: f32[100,64]) -> f32[4,64] {
  %at.2 = s32[] parameter(0)
  %buffer.2 = f32[100,64]{1,0} parameter(1)
  ROOT %read = f32[4,64]{1,0} fusion(%at.2, %buffer.2), kind=kLoop, calls=%outer
}
"""


# A collective beside other work is spread over fusions that share its channel; one of several
# arrays lists what is sent before what arrives.
OVERLAPPED = """HloModule jit_step, is_scheduled=true

%begin (shard: bf16[4,64]) -> (bf16[4,64], bf16[16,64]) {
  %shard = bf16[4,64]{1,0} parameter(0)
  %all-gather.1 = bf16[16,64]{1,0} all-gather(%shard), channel_id=7, dimensions={0}
  ROOT %custom-call.1 = (bf16[4,64]{1,0}, bf16[16,64]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%end (whole: bf16[16,64]) -> bf16[16,64] {
  %whole = bf16[16,64]{1,0} parameter(0)
  %all-gather.2 = bf16[16,64]{1,0} all-gather(%whole), channel_id=7, dimensions={0}
  ROOT %custom-call.2 = bf16[16,64]{1,0} custom-call(%all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %all-reduce.1 = f32[8]{0} all-reduce(%state), channel_id=8, to_apply=%unused
  ROOT %tuple.1 = (s32[], f32[8]{0}) tuple(%state, %all-reduce.1)
}

%below (state.1: (s32[], f32[8])) -> pred[] {
  ROOT %state.1 = (s32[], f32[8]{0}) parameter(0)
}

%unused (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%never (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  ROOT %all-reduce.2 = f32[8]{0} all-reduce(%z), channel_id=9, to_apply=%unused
}

ENTRY %main (weights: bf16[4,64], loop: f32[8]) -> f32[8] {
  %weights = bf16[4,64]{1,0} parameter(0)
  %loop = f32[8]{0} parameter(1)
  %started = (bf16[4,64]{1,0}, bf16[16,64]{1,0}) fusion(%weights), kind=kCustom, calls=%begin
  %ended = bf16[16,64]{1,0} fusion(%started), kind=kCustom, calls=%end
  %while.1 = (s32[], f32[8]{0}) while(%loop), condition=%below, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %all-gather-start.1 = ((bf16[4,64]{1,0}, f32[2]{0}), (bf16[16,64]{1,0}, f32[8]{0})) all-gather-start(%weights, %loop), channel_id=10, dimensions={0}
  ROOT %all-gather-done.1 = (bf16[16,64]{1,0}, f32[8]{0}) all-gather-done(%all-gather-start.1)
}
"""  # noqa: E501


# Two loops that read a cache, by 1024 positions and, in a fusion, by 256.
CACHES = """\
HloModule caches

%cut (c.2: bf16[2,4,2048,8], i.2: s32[]) -> bf16[2,4,256,8] {
  %c.2 = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  ROOT %slice.2 = bf16[2,4,256,8]{3,2,1,0} dynamic-slice(%c.2, %i.2, %i.2, %i.2, %i.2), dynamic_slice_sizes={2,4,256,8}
}

%long (a: bf16[2,4,2048,8]) -> bf16[2,4,2048,8] {
  %a = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  %i.1 = s32[] constant(3)
  ROOT %slice.1 = bf16[2,4,1024,8]{3,2,1,0} dynamic-slice(%a, %i.1, %i.1, %i.1, %i.1), dynamic_slice_sizes={2,4,1024,8}
}

%long_below (a.1: bf16[2,4,2048,8]) -> pred[] {
  ROOT %a.1 = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
}

%short (b: bf16[2,4,2048,8]) -> bf16[2,4,2048,8] {
  %b = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  %i.3 = s32[] constant(3)
  ROOT %fused = bf16[2,4,256,8]{3,2,1,0} fusion(%b, %i.3), kind=kLoop, calls=%cut
}

%short_below (b.1: bf16[2,4,2048,8]) -> pred[] {
  ROOT %b.1 = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
}

ENTRY %main (cache: bf16[2,4,2048,8]) -> bf16[2,4,2048,8] {
  %cache = bf16[2,4,2048,8]{3,2,1,0} parameter(0)
  %while.1 = bf16[2,4,2048,8]{3,2,1,0} while(%cache), condition=%long_below, body=%long
  ROOT %while.2 = bf16[2,4,2048,8]{3,2,1,0} while(%while.1), condition=%short_below, body=%short
}
"""  # noqa: E501


def moved(program, name):
    return next(program.moved_bytes(c, i) for c, i in program.instructions() if i.name == name)


def test_only_what_is_executed_by_itself_is_listed():
    names = {i.name for _, i in Program(TPU).instructions()}
    assert names == {
        *("rows", "copy-start.1", "next", "compare.1", "dot.1", "all-gather-start.1", "turned")
    }


def test_a_loop_s_trips_are_those_of_its_condition():
    loops = Program(TPU).executed
    assert {name: found.times(7) for name, found in loops.items()} == {
        "main.1": 1,
        "body": 4,
        "below_4": 4,
        "open_body": 7,
    }


def test_loops_over_caches_have_trips_of_their_own():
    loops = Program(CACHES).executed
    turns = functools.partial(cache_turns, Program(CACHES), 2040)
    assert {name: found.times(turns) for name, found in loops.items()} == {
        "main": 1,
        "long": 2,
        "long_below": 2,
        "short": 8,
        "short_below": 8,
    }


def test_a_look_up_moves_its_rows_and_not_the_table():
    assert moved(Program(TPU), "rows") == 8 * 64 * 2 + 8 * 4 + 8 * 64 * 2


def test_a_slice_deep_inside_a_fusion_moves_its_part_only():
    assert moved(Program(NESTED), "read") == 4 + 2 * 4 * 64 * 4


def test_a_slice_of_a_rearranged_array_moves_its_part_only():
    text = """HloModule cut

%fused (x: bf16[5,12]) -> f32[1,5,4] {
  %x = bf16[5,12]{1,0} parameter(0)
  %b = bf16[5,3,4]{2,1,0} bitcast(%x)
  %t = bf16[3,5,4]{2,1,0} transpose(%b), dimensions={1,0,2}
  %wide = f32[3,5,4]{2,1,0} convert(%t)
  ROOT %cut = f32[1,5,4]{2,1,0} slice(%wide), slice={[1:2], [0:5], [0:4]}
}

ENTRY %main (x.1: bf16[5,12]) -> f32[1,5,4] {
  %x.1 = bf16[5,12]{1,0} parameter(0)
  ROOT %read = f32[1,5,4]{2,1,0} fusion(%x.1), kind=kLoop, calls=%fused
}
"""
    assert moved(Program(text), "read") == 5 * 4 * 2 + 5 * 4 * 4


def test_an_update_of_a_widened_buffer_reads_all_of_it():
    text = """HloModule widened

%fused (x: bf16[64,8], part: f32[1,8], at: s32[]) -> bf16[64,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %part = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[64,8]{1,0} convert(%x)
  %updated = f32[64,8]{1,0} dynamic-update-slice(%wide, %part, %at, %zero)
  ROOT %narrow = bf16[64,8]{1,0} convert(%updated)
}

ENTRY %main (x.1: bf16[64,8], part.1: f32[1,8], at.1: s32[]) -> bf16[64,8] {
  %x.1 = bf16[64,8]{1,0} parameter(0)
  %part.1 = f32[1,8]{1,0} parameter(1)
  %at.1 = s32[] parameter(2)
  ROOT %read = bf16[64,8]{1,0} fusion(%x.1, %part.1, %at.1), kind=kLoop, calls=%fused
}
"""
    buffer = 64 * 8 * 2
    assert moved(Program(text), "read") == 2 * buffer + 8 * 4 + 4


def test_a_prefetched_weight_is_read_once():
    program = Program(TPU)
    assert moved(program, "copy-start.1") == 64 * 32 * 2
    assert moved(program, "dot.1") == 8 * 64 * 2 + 8 * 32 * 2


def test_a_weight_laid_out_anew_is_seen_and_a_prefetch_is_none():
    made = Program(TPU).made((64, 32))
    assert [instruction.opcode for instruction in made] == ["transpose"]


def test_collectives_are_listed_with_what_arrives():
    (gathered,) = Program(TPU).collectives()
    assert gathered.result_bytes == 32 * 32 * 2
    assert str(gathered).startswith("all-gather-start bf16[32,32]")


def test_what_is_sent_is_counted_once_however_it_is_spread():
    sent = Program(OVERLAPPED).sent(trips=3)
    assert sent == [
        Sent("all-gather", 1, 2 * 16 * 64 + 4 * 8),
        Sent("all-gather", 1, 2 * 16 * 64),
        Sent("all-reduce", 5, 4 * 8),
    ]


def test_cycles_and_sources_are_read():
    found = {i.name: i for _, i in Program(TPU).instructions()}
    assert (found["dot.1"].cycles, found["next"].cycles) == (120, 7)
    assert short_source(found["dot.1"].source) == "verify/Decoder/layers_0/mlp"


def test_counting_up_costs_the_cycles_that_the_compiler_says():
    line = "  %%steps = s32[4]{0:T(128)} iota(), iota_dimension=0, backend_config={%s}\n"
    text = TPU.replace("  %rows = ", line % '"estimated_cycles":"2120"' + "  %rows = ")
    found = {i.name: i for _, i in Program(text).instructions()}
    assert found["steps"].cycles == 2120


def test_a_compiled_product_moves_its_operands():
    def product(a, b):
        return a @ b

    shapes = jax.ShapeDtypeStruct((96, 64), jnp.float32), jax.ShapeDtypeStruct((64, 128), "float32")
    program = Program(jax.jit(product).lower(*shapes).compile().as_text())
    sizes = [program.moved_bytes(c, i) for c, i in program.instructions()]
    assert sum(sizes) == 4 * (96 * 64 + 64 * 128 + 96 * 128)
    assert program.largest_results(1)[0].result_bytes == 4 * 96 * 128


def test_an_update_in_place_moves_its_rows_only():
    def update(buffer, row, at):
        return jax.lax.dynamic_update_slice(buffer, row, (at, 0))

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((500, 64), (1, 64))]
    at = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(update, donate_argnums=0).lower(*shapes, at)
    program = Program(lowered.compile().as_text())
    assert program.made((500, 64)) == []
    assert sum(program.moved_bytes(c, i) for c, i in program.instructions()) < 500 * 64 * 4 / 10
    assert sum(program.written_bytes(c, i) for c, i in program.instructions()) == 64 * 4


def test_a_rolled_buffer_is_seen_as_made_anew():
    def careless(cache):
        return jax.lax.fori_loop(0, 4, lambda i, c: jnp.roll(c, 1, axis=2) + c, cache)

    cache = jax.ShapeDtypeStruct((3, 2, 768, 8), jnp.float32)
    text = jax.jit(careless, donate_argnums=0).lower(cache).compile().as_text()
    assert Program(text).made((3, 2, 768, 8))


PARTS = """HloModule jit_step

ENTRY %main (weights: bf16[64,32], x: bf16[8,64]) -> bf16[8,32] {
  %weights = bf16[64,32]{1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %split = f32[2,8,32]{2,1,0} custom-call(%x, %weights)
  %drafted = bf16[8,32]{1,0} add(%split, %split), metadata={op_name="jit(step)/draft/Head.propose/add"}
  %prefetch = bf16[64,32]{1,0} copy(%weights)
  %through = bf16[64,32]{1,0} bitcast(%prefetch)
  %verified = bf16[8,32]{1,0} dot(%drafted, %through), metadata={op_name="jit(step)/verify/Decoder/dot_general"}
  %again = bf16[8,32]{1,0} dot(%verified, %through), metadata={op_name="jit(step)/accept/dot_general"}
  ROOT %stray = bf16[8,32]{1,0} negate(%again)
}
"""  # noqa: E501


# A TPU's program that keeps a weight in fast memory from one call to the next: another operand
# takes its place meanwhile, so the end of the program brings it back.
ACROSS_CALLS = """HloModule jit_step, is_scheduled=true

ENTRY %main (weights: bf16[64,32], x: bf16[8,64]) -> bf16[8,32] {
  %weights = bf16[64,32]{1,0} parameter(0)
  %copy-start = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%weights), cross_program_prefetch_index=0
  %x = bf16[8,64]{1,0} parameter(1)
  %copy-start.2 = (bf16[8,64]{1,0:S(1)}, bf16[8,64]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = bf16[64,32]{1,0:S(1)} copy-done(%copy-start)
  %copy-done.2 = bf16[8,64]{1,0:S(1)} copy-done(%copy-start.2)
  %drafted = bf16[8,32]{1,0} dot(%copy-done.2, %copy-done), metadata={op_name="jit(step)/draft/dot_general"}
  %copy-start.1 = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%weights)
  %copy-done.1 = bf16[64,32]{1,0:S(1)} copy-done(%copy-start.1)
  ROOT %result = bf16[8,32]{1,0} copy(%drafted), metadata={op_name="jit(step)/draft/copy"}
}
"""  # noqa: E501


def test_a_prefetch_for_the_next_call_counts_once_and_for_its_user():
    program = Program(ACROSS_CALLS)
    weights, rows, results = 2 * 64 * 32, 2 * 8 * 64, 3 * 2 * 8 * 32
    moved = sum_by_part(program, program.moved_bytes)
    assert moved == {"draft": weights + rows + results}


def test_a_weight_that_is_fetched_and_used_again_in_the_same_call_counts_twice():
    again = "%result = bf16[8,32]{1,0} dot(%x, %copy-done.1)"
    text = ACROSS_CALLS.replace("%result = bf16[8,32]{1,0} copy(%drafted)", again)
    names = [i.name for _, i in Program(text).instructions()]
    assert names == ["copy-start", "copy-start.2", "drafted", "copy-start.1", "result"]


def test_what_has_no_scope_belongs_to_the_first_part_that_uses_it():
    program = Program(PARTS)
    parts = part_of(program, "main")
    assert parts["split"] == "draft"
    assert parts["prefetch"] == parts["through"] == "verify"
    assert parts["stray"] == "other"
    moved = sum_by_part(program, program.moved_bytes)
    assert list(moved) == ["draft", "verify", "accept", "other"]
    assert sum(moved.values()) == sum(program.moved_bytes(*i) for i in program.instructions())
    # The divided product reads both operands and writes float32 parts, which the sum reads twice.
    product, addition = 8 * 64 * 2 + 64 * 32 * 2 + 2 * 8 * 32 * 4, 2 * 2 * 8 * 32 * 4 + 8 * 32 * 2
    assert moved["draft"] == product + addition


KERNEL = """HloModule jit_step, is_scheduled=true

ENTRY %main.1 (query: bf16[2,4,10,128], key: bf16[2,4,1000,128]) -> f32[2,4,10,128] {
  %query = bf16[2,4,10,128]{3,2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %key = bf16[2,4,1000,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %read_cache.1 = f32[2,4,10,128]{3,2,1,0:T(8,128)} custom-call(%query, %key), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/verify/read_cache/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"4096000","transcendentals":"80000","bytes_accessed":"2109440","remote_bytes_transferred":"0"}}}
}
"""  # noqa: E501


def test_a_kernel_counts_what_it_declares_and_the_live_part_of_the_cache():
    program, live = Program(KERNEL), Live(share=0.25, positions=1000)
    _, kernel = next(program.instructions())
    assert kernel.declared == (4096000, 2109440)
    written, cache = 4 * 2 * 4 * 10 * 128, 2 * 2 * 4 * 1000 * 128
    assert moved_by_part(program, 1, live) == {"verify": written + cache / 4}
    # Whichever takes longer: at this rate the products.
    chip = dataclasses.replace(CHIPS["v6e"], bandwidth=1e15, matrix_rate=4096)
    assert kernel_seconds(program, chip, 1, live) == {"verify": 250.0}
