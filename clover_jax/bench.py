"""Time a decoding step against the limits of the hardware, here or for hardware you do not have.

    python -m clover_jax.bench --base=shape:llama-100m --force_accept=2
    python -m clover_jax.bench --base=shape:llama3-8b --target=tpu-v6e:2x2 --dtype=bfloat16

Without --target every part of a step is timed on this machine and compared with its floor: bytes at
the measured bandwidth, or products at the measured matrix rate. Random weights are enough
(shape:NAME, random:KIND, random:dflash2:num_layers=2). --sweep times several batch sizes and trees,
to find the accepted length at which speculation breaks even.

With --target the step is compiled for hardware that is not here, and the compiled program is read:
memory, bytes moved against the floor, copies of caches and weights, collectives.
"""

import dataclasses
import os
import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.errors import UserError
from clover_jax.field_types import setting
from clover_jax.loading.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """The flags of `bench`, without the ones it shares with other commands."""

    batch_size: int = setting(1, "rows decoded at once", least=1)
    context: int | None = setting(
        None, "positions already committed in every row [1024, or what fits]", least=1
    )
    rounds: int = setting(15, "repetitions; the median is reported", least=3)
    force_accept: int | None = setting(
        None, "accept exactly this many drafted tokens; for timing only"
    )
    sweep: bool = setting(False, "time --batch_sizes and --nodes as well")
    batch_sizes: tuple[str, ...] = setting(("1", "4", "16"), "of --sweep")
    nodes: tuple[str, ...] = setting(("4", "8", "16", "24", "64"), "of --sweep")
    output: str | None = setting(None, "folder for the table and the figure of --sweep")
    target: str | None = setting(
        None, "compile for this instead: tpu-v6e:2x2, tpu-v5e:4x4, gpu-h200"
    )
    program: str | None = setting(None, "file for the compiled program's text, with --target")


def define_flags(flags):
    """Define this command's flags."""
    define_settings(flags, BenchSettings)
    define_settings(flags, ModelSpec, "draft", "tree", "int8", "attention")
    flags.set_default("draft", "random:clover2")  # any weights cost the same
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    _refuse_idle_flags(flags)
    cli.report(_measure(flags) if flags.target is None else _compile(flags))
    return cli.STATUS_OK


def _refuse_idle_flags(flags) -> None:
    """Raise UserError for a flag that has no effect with the others."""
    if flags.target is not None:
        idle = ["sweep", "batch_sizes", "nodes", "output", "force_accept", "rounds"]
        why = "to measure, not for --target"
    elif flags.sweep:
        idle, why = ["program", "force_accept", "batch_size"], "not for --sweep"
    else:
        idle = ["program", "output", "batch_sizes", "nodes"]
        why = "for --target (program) and --sweep (the others)"

    for name in idle:
        if flags[name].value != flags[name].default:
            raise UserError(f"--{name} is {why}")

    # Values that no mode of the command can use.
    if flags.tree == "auto":
        raise UserError("--tree=auto is for generate; bench takes a tree, as dynamic:25")
    if flags.draft == "none" and flags.tree not in (None, "none"):
        raise UserError(f"--tree={flags.tree} needs a draft, and --draft=none has none")
    if flags.draft == "none" and "draft" in flags.int8:
        raise UserError("--int8=draft needs a draft, and --draft=none has none; give --int8=base")


def _measure(flags) -> dict:
    # Before JAX is imported, so that the answer comes at once.
    if flags.mesh is not None:
        raise UserError(f"--mesh={flags.mesh}: bench times one device; leave --mesh out")
    from clover_jax import benchmark
    from clover_jax.runtime.device_memory import advise_on_memory

    # No head was trained for random weights.
    is_random = flags.base.startswith("shape:")
    spec = settings_from(flags, ModelSpec, allow_base_mismatch=is_random, tokenizer=False)
    shared = {"context": flags.context, "rounds": flags.rounds}
    sizes = "--batch_sizes" if flags.sweep else "--batch_size"
    advice = f"give smaller {sizes}, --context or --tree, --dtype=bfloat16 or --int8=base,draft"
    with advise_on_memory("time this", advice):
        if not flags.sweep:
            forced = {"batch": flags.batch_size, "force_accept": flags.force_accept}
            return benchmark.measure_and_describe(spec, **shared, **forced)
        counts = {name: _numbers(name, flags[name].value) for name in ("batch_sizes", "nodes")}
        return benchmark.sweep_and_describe(spec, **shared, **counts, output=flags.output)


def _compile(flags) -> dict:
    from clover_jax.xla.targets import parse_target, prepare_environment

    target = parse_target(flags.target)
    prepare_environment(target, os.environ)  # before JAX is imported
    from clover_jax import benchmark

    # "auto" would choose by this machine, not by the target.
    dtype = "bfloat16" if flags.dtype == "auto" else flags.dtype
    spec = settings_from(flags, ModelSpec, dtype=dtype)
    return benchmark.compile_and_describe(
        target, spec, batch=flags.batch_size, context=flags.context, program=flags.program
    )


def _numbers(name: str, words: list[str]) -> list[int]:
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--{name}={','.join(words)} must be numbers from 1 up, as in 1,4,16")
    return [int(word) for word in words]


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
