"""Measure a decoding step against the limits of the hardware, this machine's or a target's.

    python -m clover_jax.bench --base=shape:llama-100m --force_accept=2
    python -m clover_jax.bench --base=shape:llama3-8b --target=tpu-v6e:2x2 --dtype=bfloat16

Without --target every part of a step is timed on this machine and compared with its floor: its
bytes at the measured bandwidth, or its products at the measured matrix rate. Random weights will do
(shape:NAME, random:KIND, random:dflash2:num_layers=2). --sweep times batch sizes and trees of
several sizes: at which accepted length does speculation break even?

With --target the step is compiled for hardware that you do not have, and the compiler's account is
printed: does it fit, bytes of memory, FLOPs, bytes accessed, next to the floor of the data sheet.
"""

import dataclasses
import os
import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import setting


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """The flags of `bench` in addition to those that other commands have too."""

    batch_size: int = setting(1, "rows decoded at once", least=1)
    context: int | None = setting(
        None, "tokens already in each row's KV cache [1024, or what fits]", least=1
    )
    rounds: int = setting(15, "repetitions; the median is reported", least=3)
    force_accept: int | None = setting(
        None, "accept exactly this many drafted tokens; for timing only"
    )
    sweep: bool = setting(False, "time every one of --batch_sizes with --nodes")
    batch_sizes: tuple[str, ...] = setting(("1", "4", "16"), "batch sizes for --sweep")
    nodes: tuple[str, ...] = setting(("4", "8", "16", "24", "64"), "tree sizes for --sweep")
    target: str | None = setting(
        None, "compile for this hardware instead: tpu-v6e:2x2, tpu-v5e:4x4, gpu-h200"
    )


def define_flags(flags):
    """Define this command's flags."""
    define_settings(flags, BenchSettings)
    define_settings(flags, ModelSpec, "draft", "tree", "int8", "attention")
    flags.set_default("draft", "random:clover2")  # any weights cost the same
    cli.define_common_flags(flags, "workdir", "seed")


def main(flags) -> int:
    """Run the command."""
    _refuse_idle_flags(flags)
    cli.report(_measure(flags) if flags.target is None else _compile(flags))
    return cli.STATUS_OK


def _refuse_idle_flags(flags) -> None:
    """Raise UserError for a flag without effect."""
    if flags.target is not None:
        idle = ["sweep", "batch_sizes", "nodes", "force_accept", "rounds"]
        why = "to measure, not for --target"
    elif flags.sweep:
        idle, why = ["force_accept", "batch_size"], "not for --sweep"
    else:
        idle, why = ["batch_sizes", "nodes"], "for --sweep"

    for name in idle:
        if flags[name].value != flags[name].default:
            raise UserError(f"--{name} is {why}")

    # Values that no mode of the command can use.
    if flags.tree == "auto":
        raise UserError(
            "--tree=auto is for generate and evaluate; bench takes a tree, as dynamic:25"
        )
    if flags.draft == "none" and flags.tree not in (None, "none"):
        raise UserError(f"--tree={flags.tree} needs a draft, and --draft=none has none")
    if flags.draft == "none" and "draft" in flags.int8:
        raise UserError("--int8=draft needs a draft, and --draft=none has none; give --int8=base")


def _measure(flags) -> dict:
    # Before JAX is imported, so that the answer comes at once.
    if flags.mesh is not None:
        raise UserError(f"--mesh={flags.mesh}: bench times one device; leave --mesh out")
    from clover_jax.evaluation.measured import measure_and_describe, sweep_and_describe
    from clover_jax.runtime.device_memory import advise_on_memory

    # No head was trained for a base with random weights.
    is_random = flags.base.startswith("shape:")
    spec = settings_from(flags, ModelSpec, allow_base_mismatch=is_random, tokenizer=False)
    shared = {"context": flags.context, "rounds": flags.rounds}
    sizes = "--batch_sizes" if flags.sweep else "--batch_size"
    advice = f"give smaller {sizes}, --context or --tree, --dtype=bfloat16 or --int8=base,draft"
    with advise_on_memory("time this", advice):
        if not flags.sweep:
            forced = {"batch": flags.batch_size, "force_accept": flags.force_accept}
            return measure_and_describe(spec, **shared, **forced)
        batch_sizes, nodes = (_numbers(flags[name]) for name in ("batch_sizes", "nodes"))
        return sweep_and_describe(spec, **shared, batch_sizes=batch_sizes, nodes=nodes)


def _compile(flags) -> dict:
    from clover_jax.evaluation.targets import parse_target, prepare_environment

    target = parse_target(flags.target)
    prepare_environment(target, os.environ)  # before JAX is imported
    from clover_jax.evaluation.compiled import compile_and_describe

    # "auto" would choose by this machine, not by the target.
    dtype = "bfloat16" if flags.dtype == "auto" else flags.dtype
    spec = settings_from(flags, ModelSpec, dtype=dtype)
    return compile_and_describe(target, spec, batch=flags.batch_size, context=flags.context)


def _numbers(flag) -> list[int]:
    words = flag.value
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--{flag.name}={','.join(words)} must be numbers from 1 up, as in 1,4,16")
    return [int(word) for word in words]


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
