"""Compile and run: the programs of an engine, on one device or a mesh, and chunks of steps.

A chunk of steps is what the device does between two reads of its results by the host. Only on CPU
is a chunk one program, a loop over the step. Elsewhere the step is the program, and the host calls
it again, one call ahead of the device, because other compilers handle the weights and caches of a
loop worse than a program's own arguments: compiled for Llama-3-8B, a TPU's keeps `gate_up` of every
layer in a second layout (8 GB), and a GPU's transposes all keys at every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from clover_jax.array_types import Array, Bool, Int, PyTree
from clover_jax.decoding.grammars import draft_chain
from clover_jax.decoding.prefill import prefill_chunk
from clover_jax.decoding.sampling import MOST_ALTERNATIVES, RowBias, RowPenalties, Scores, row_key
from clover_jax.decoding.state import (
    RUNNING,
    DecodeState,
    clear,
    draft_beginning,
    empty_state,
    extract,
    grow,
    insert,
)
from clover_jax.decoding.step import (
    StepConfig,
    StepRecord,
    Weights,
    accept_and_commit,
    draft,
    speculate_and_verify,
    verify_tree,
)
from clover_jax.decoding.tree_config import CopyTree
from clover_jax.models.cache import delta_states
from clover_jax.models.delta_net import DeltaState
from clover_jax.models.meshes import shape_of
from clover_jax.models.placement import (
    decode_state_shardings,
    param_shardings,
    put_whole,
    replicated,
)

MOST_KEPT = 32  # cached sets of programs: an engine equal to an earlier one traces nothing
QUEUED = 2  # steps: one that runs and one that waits, so that the device never waits for the host

Options = dict[str, bool | int | str]
Records = StepRecord | tuple[StepRecord, ...]
# (weights, state, filled, most) -> (state, records)
# filled: [B] which slots hold a row; most: steps to run, None for a whole chunk
# With masks (`SamplingConfig.masked`) a chunk is one step, with more arguments that make them.
Chunk = Callable[..., tuple[DecodeState, Records]]
Carry = TypeVar("Carry")

# A product of one row with a matrix (batch 1: plain decoding, the first draft levels) is otherwise
# turned into multiplications and sums on the vector unit: 3.4 times the time of reading the matrix,
# by the compiler's own estimate for a v6e and lm_head of Llama 3.
#
# Over a mesh, a large product with a gathered operand is otherwise cut into windows that overlap
# with sending. A decode step gathers a few rows only, and the windows are of its weights: lm_head
# is laid out again at every step.
_TPU: Options = {
    "xla_tpu_enable_dot_strength_reduction": False,
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
}


def options_for(platform: str) -> Options | None:
    """Return the compiler's options of decoding programs for "cpu", "gpu", "cuda" or "tpu"."""
    return dict(_TPU) if platform == "tpu" else None


@functools.cache
def options_here() -> Options | None:
    """Return the options for the default device; None where its compiler does not know them."""
    options = options_for(jax.default_backend())
    if options is None:
        return None
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # another release of the compiler: slower, not wrong
        return None
    return options


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of an engine; mesh: None for a single one."""

    mesh: Mesh | None

    def whole_rows(self, batch_size: int) -> int:
        """Return the least number of rows, `batch_size` or more, that all devices can share."""
        # Rounded up: rows that cannot be split evenly would all lie on every device.
        shards = shape_of(self.mesh).num_row_shards
        return -(-batch_size // shards) * shards

    def array(self, value: Any, dtype: DTypeLike | None = None) -> Array:
        """Put a host's value on the device, or whole on every device of the mesh."""
        if self.mesh is None:
            return jnp.array(value, dtype)
        return put_whole(np.asarray(value, dtype), self.mesh)

    def weights(self, weights: Weights) -> Weights:
        """Split weights over the mesh; weights that lie there already stay."""
        if self.mesh is None:
            return weights
        return jax.device_put(weights, param_shardings(weights, self.mesh))

    def state(self, state: DecodeState) -> DecodeState:
        if self.mesh is None:
            return state
        return jax.device_put(state, decode_state_shardings(state, self.mesh))

    def in_use(self) -> contextlib.AbstractContextManager:
        """Return the context in which programs know the mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def compiled(self, function: Callable, **options: Any) -> Callable:
        """Return a compiled function of states; on a mesh its result lies as states do there."""
        mesh = self.mesh
        if mesh is None:
            return jax.jit(function, **options)

        def placed(*arguments: Any) -> Any:
            # XLA may choose another layout for a result; the next call would then copy the caches.
            result = function(*arguments)
            # The state comes first where a program returns more than that.
            states, *records = result if isinstance(result, tuple) else (result,)
            there = decode_state_shardings(states, mesh)
            states = jax.lax.with_sharding_constraint(states, there)
            return (states, *records) if records else states

        compiled = jax.jit(placed, **options)

        def call(*arguments: Any) -> Any:
            # A call may trace the function, which looks up the mesh in use.
            with self.in_use():
                return compiled(*arguments)

        return call

    def whole(self, arrays: PyTree) -> PyTree:
        """Within a program: replicate small arrays on every device, for each host to read."""
        if self.mesh is None:
            return arrays
        return jax.lax.with_sharding_constraint(arrays, replicated(self.mesh))

    def copies(self, arrays: PyTree) -> PyTree:
        """Copy arrays of a state that the next program consumes, replicated for every host."""
        return _copy_program(self.mesh)(arrays)

    def read(self, arrays: PyTree) -> PyTree:
        return jax.device_get(self.copies(arrays))


@functools.cache  # or every chunk of steps would compile it again
def _copy_program(mesh: Mesh | None) -> Callable[[PyTree], PyTree]:
    shardings = None if mesh is None else replicated(mesh)
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings)


class StatePrograms(NamedTuple):
    """Programs that make states and move rows between them; most are from `decoding.state`.

    empty: (batch, size, dtype) -> empty slots.
    begin: (size, dtype, fields, settings, seed, numbers) -> a batch of one. fields: of its
        DecodeState; settings: of its RowSampling but the key, `bias` and `penalties` as their
        fields.
    snapshot: row -> copies of the states of its delta nets.
    """

    empty: Callable[..., DecodeState]
    begin: Callable[..., DecodeState]
    insert: Callable[..., DecodeState]
    clear: Callable[..., DecodeState]
    extract: Callable[..., DecodeState]
    grow: Callable[..., DecodeState]
    draft_beginning: Callable
    snapshot: Callable[[DecodeState], list[DeltaState]]


@functools.lru_cache(maxsize=MOST_KEPT)
def compile_state_programs(
    config: StepConfig, source_size: int, num_eos: int, placement: Placement
) -> StatePrograms:
    """Return the programs of an engine's states; they compile when they are called."""

    def empty(batch: int, size: int, dtype: np.dtype) -> DecodeState:
        shapes = config.base, config.head, config.tree, batch, size, num_eos, dtype
        room = {name: getattr(config.sampling, name) for name in ("biased", "penalized")}
        return empty_state(*shapes, source_size=source_size, **room)

    def begin(
        size: int, dtype: np.dtype, fields: dict[str, Any], settings: dict[str, Any], *key: Array
    ) -> DecodeState:
        row = empty(1, size, dtype)
        kinds = {"bias": RowBias, "penalties": RowPenalties}
        made = {name: kind(*settings.pop(name)) for name, kind in kinds.items() if name in settings}
        rules = row.sampling.replace(key=row_key(*key), **made, **settings)
        return row.replace(sampling=rules, **fields)

    # States are donated, so that every program updates caches in place.
    compiled = placement.compiled
    return StatePrograms(
        empty=compiled(empty, static_argnums=(0, 1, 2)),
        begin=compiled(begin, static_argnums=(0, 1)),
        insert=compiled(insert, donate_argnums=0),
        clear=compiled(clear, donate_argnums=0),
        extract=compiled(extract),
        grow=compiled(grow, static_argnums=1),
        draft_beginning=jax.jit(draft_beginning),
        snapshot=jax.jit(lambda row: jax.tree.map(jnp.copy, delta_states(row.cache))),
    )


class Programs(NamedTuple):
    """The compiled programs of one set of sampling rules.

    prefill: (weights, row, start) -> (row, scores), for a batch of one; it consumes the row. With
        masks a further argument is that of the first token.
    read_last: the same for a prompt's last token alone, where its other tokens are read already.
    decode: a chunk of steps.
    """

    prefill: Callable[..., tuple[DecodeState, Scores | None]]
    read_last: Callable[..., tuple[DecodeState, Scores | None]]
    decode: Chunk

    def for_states_with(self, *unread: str) -> Programs:
        """Return the programs for states with fields of RowSampling that these do not read."""

        def without(program: Callable) -> Callable:
            def call(weights: Weights, state: DecodeState, *more: Any) -> tuple[DecodeState, Any]:
                kept = {name: getattr(state.sampling, name) for name in unread}
                least = state.sampling.replace(**dict.fromkeys(unread))
                state, result = program(weights, state.replace(sampling=least), *more)
                return state.replace(sampling=state.sampling.replace(**kept)), result

            return call

        return Programs(*[without(program) for program in self])


@functools.lru_cache(maxsize=MOST_KEPT)
def compile_programs(
    config: StepConfig, prefill_size: int, num_steps: int, placement: Placement
) -> Programs:
    """Return the programs that read prompts and decode; they compile when they are called."""

    def reading(size: int) -> Callable:
        def read(weights: Weights, row: DecodeState, *more: Array) -> tuple[DecodeState, Any]:
            row, scores = prefill_chunk(config, size, weights, row, *more)
            return row, placement.whole(scores)

        return placement.compiled(read, donate_argnums=1)

    if config.sampling.masked:
        chunk = compile_masked_step(config, placement)
    else:
        chunk = compile_chunk(config, num_steps, placement)
    return Programs(prefill=reading(prefill_size), read_last=reading(1), decode=chunk)


def compile_chunk(config: StepConfig, num_steps: int, placement: Placement) -> Chunk:
    """Return a function that runs `num_steps` steps, or fewer where a row ends.

    It consumes the state. `read_records` reads its records.
    """

    def compiled(function: Callable) -> Callable:
        # The state is donated, so that its caches are updated in place.
        return placement.compiled(function, donate_argnums=1, compiler_options=options_here())

    def loop(weights: Weights, state: DecodeState, filled: Array, most: Array) -> tuple:
        # Every host reads the records, so each of its devices gets them whole.
        state, records = decode_chunk(config, num_steps, weights, state, filled, most)
        return state, placement.whole(records)

    def step(weights: Weights, state: DecodeState) -> tuple[DecodeState, StepRecord, Array]:
        state, record = speculate_and_verify(config, weights, state)
        # The rows that still run are returned apart from the state, which the next call consumes.
        return state, *placement.whole((record, state.finish == RUNNING))

    one_step = compiled(step)

    def by_calls(
        weights: Weights, state: DecodeState, filled: np.ndarray, limit: np.int32
    ) -> tuple[DecodeState, tuple[StepRecord, ...]]:
        records: list[StepRecord] = []
        running: list[Array] = []
        # When the host sees that a row has ended, QUEUED - 1 further steps are already called.
        for index in range(limit):
            # Wait for the step called QUEUED calls ago; later calls keep the device busy.
            if index >= QUEUED and (filled & ~np.asarray(running[index - QUEUED])).any():
                break
            state, record, runs = one_step(weights, state)
            records.append(record)
            running.append(runs)
        return state, tuple(records)

    run: Chunk = compiled(loop) if loops_on_device() else by_calls

    def chunk(weights: Weights, state: DecodeState, filled: np.ndarray, most: int | None = None):
        limit = num_steps if most is None else min(most, num_steps)
        # The limit is an argument of the compiled loop, so a new limit compiles nothing.
        return run(weights, state, filled, np.int32(limit))

    return chunk


def compile_masked_step(config: StepConfig, placement: Placement) -> Chunk:
    """Return a function that runs one step, with masks that the host makes in the middle of it.

    They are made from the drafted tree, while the device verifies it. The function's last arguments
    are chains() -> {row: tokens that its form forces}, which are drafted in place of others and cut
    as in `draft_chain`, and masks(tokens [B, T], parent [B or 1, T]), as in `sampling.mask_out`.
    """

    def last(weights: Weights, state: DecodeState, *more: Any) -> tuple[DecodeState, StepRecord]:
        state, record = accept_and_commit(config, weights, state, *more)
        return state, placement.whole(record)

    options: dict[str, Any] = {"compiler_options": options_here()}
    drafting = placement.compiled(functools.partial(draft, config), donate_argnums=1, **options)
    verifying = jax.jit(functools.partial(verify_tree, config), **options)
    ending = placement.compiled(last, donate_argnums=1, **options)

    def step(
        weights: Weights,
        state: DecodeState,
        filled: np.ndarray,
        most: int | None,
        chains: Callable[[], dict[int, list[int]]],
        masks: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> tuple[DecodeState, tuple[StepRecord]]:
        state, drafted = drafting(weights, state)
        tree = drafted.tree
        # Copied before the forward begins, or the host would wait for that.
        slots = placement.copies((tree.tokens, tree.parent))
        # Draws from the draft must stay as they were drawn.
        if drafted.drafts is None and tree.depth and (forced := chains()):
            tokens, parent = map(np.array, jax.device_get(slots))
            for row, chain in forced.items():
                above = parent[row % len(parent)]
                draft_chain(chain, tokens[row], above, len(parent) < len(tokens))
            slots = tokens, parent
            tree = tree.replace(tokens=placement.array(tokens), parent=placement.array(parent))
            drafted = drafted.replace(tree=tree)
        with placement.in_use():
            verified = verifying(weights, state, tree)
        allowed = placement.array(masks(*jax.device_get(slots)))
        state, record = ending(weights, state, drafted, verified, allowed)
        return state, (record,)

    return step


def decode_chunk(
    config: StepConfig,
    num_steps: int,
    weights: Weights,
    state: DecodeState,
    filled: Bool[Array, " B"],
    most: Int[Array, ""] | int | None = None,
) -> tuple[DecodeState, StepRecord]:
    """Run steps until a row of a filled slot has ended, but at most `num_steps` and `most`.

    Records have a leading [num_steps]; steps that did not run have emitted nothing.
    """
    most = num_steps if most is None else most

    def body(carry: tuple[Array, DecodeState, StepRecord]):
        done, state, records = carry
        state, record = speculate_and_verify(config, weights, state)
        # A loop's carry has a fixed shape, so each record overwrites its row of zeros.
        records = jax.tree.map(lambda every, one: every.at[done].set(one), records, record)
        return done + 1, state, records

    # A row that ends in a filled slot stops the chunk, so that the slot is refilled.
    start = (jnp.int32(0), state, _no_records(num_steps, filled.shape[0], config))
    return jax.lax.while_loop(
        lambda now: (now[0] < most) & ((now[1].finish == RUNNING) | ~filled).all(), body, start
    )[1:]


def _no_records(num_steps: int, batch: int, config: StepConfig) -> StepRecord:
    def zeros(*shape: int, dtype: DTypeLike = jnp.int32) -> Array:
        return jnp.zeros((num_steps, batch, *shape), dtype)

    # The shapes of a step's record, written out: `jax.eval_shape` would trace the step once more.
    depth, scores = config.tree.depth, None
    copied = zeros() if isinstance(config.tree, CopyTree) else None
    if config.sampling.scored:
        top = (depth + 1, min(MOST_ALTERNATIVES, config.base.vocab_size))
        float32 = jnp.float32
        scores = Scores(
            log_probability=zeros(depth + 1, dtype=float32),
            at_temperature=zeros(depth + 1, dtype=float32),
            top_ids=zeros(*top),
            top_log_probabilities=zeros(*top, dtype=float32),
        )
    return StepRecord(zeros(), zeros(), zeros(), zeros(depth), copied, scores)


def read_records(records: Records) -> StepRecord:
    """Bring a chunk's records to the host, with a leading axis of steps."""
    found = jax.device_get(records)
    if isinstance(found, StepRecord):
        return found
    return jax.tree.map(lambda *each: np.stack(each), *found)


def loops_on_device() -> bool:
    """Return whether steps are repeated with a loop within one program here."""
    return jax.default_backend() == "cpu"


def repeated(
    body: Callable[[PyTree, Carry, Array], Carry], **options: Any
) -> Callable[[PyTree, Carry, int], Carry]:
    """Return a compiled function (arguments, carry, count) that consumes the carry.

    It applies body(arguments, carry, number) for number = 0 .. count - 1. options: of jax.jit.
    """
    # One call at a time: each program gets weights and caches as plain arguments.
    if not loops_on_device():
        step = jax.jit(body, donate_argnums=1, **options)

        def call(arguments: PyTree, carry: Carry, count: int) -> Carry:
            for number in range(count):
                carry = step(arguments, carry, np.int32(number))
            return carry

        return call

    def loop(arguments: PyTree, carry: Carry, count: Array) -> Carry:
        return jax.lax.fori_loop(0, count, lambda number, c: body(arguments, c, number), carry)

    return jax.jit(loop, donate_argnums=1, **options)
