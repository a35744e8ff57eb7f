"""Read the program that a target's compiler makes of a decoding or training step.

    python -m experiments.aot decode --target=tpu-v6e:2x2 --base=shape:llama3-8b --batch_size=16
    python -m experiments.aot train --target=tpu-v5e:4x4 --base=shape:llama3-8b \\
        --flagfile=experiments/clover2_llama3_8b.flags

Needs the target's compiler (`jax[tpu]` or `jax[cuda13]`), not the hardware. The flags are those of
`clover_jax.bench` and of `clover_jax.train`. experiments/aot/README.md explains the report.
"""

import dataclasses
import os
import sys

from clover_jax import cli
from clover_jax.bench import BenchSettings
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import setting
from clover_jax.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class ProgramSettings:
    """The flag of this tool alone."""

    program: str | None = setting(None, "file for the compiled program's text")


def define_decode_flags(flags):
    """Define the flags of `decode`."""
    define_settings(flags, BenchSettings, "target", "batch_size", "context")
    define_settings(flags, ModelSpec, "draft", "tree", "int8", "attention")
    define_settings(flags, ProgramSettings)
    flags.set_default("draft", "random:clover2")
    cli.define_common_flags(flags)


def decode(flags) -> int:
    """Compile a decoding step and report."""
    target = _prepared_target(flags)
    from experiments.aot.decoding import compile_and_describe

    # "auto" would choose by this machine, not by the target.
    dtype = "bfloat16" if flags.dtype == "auto" else flags.dtype
    spec = settings_from(flags, ModelSpec, dtype=dtype)
    cli.report(
        compile_and_describe(
            target, spec, batch=flags.batch_size, context=flags.context, program=flags.program
        )
    )
    return cli.STATUS_OK


def define_train_flags(flags):
    """Define the flags of `train`."""
    define_settings(flags, BenchSettings, "target")
    define_settings(flags, TrainSettings)
    define_settings(flags, ProgramSettings)
    cli.define_common_flags(flags)


def train(flags) -> int:
    """Compile a training step and report."""
    target = _prepared_target(flags)
    from experiments.aot.training import compile_and_describe

    settings = settings_from(flags, TrainSettings)
    cli.report(compile_and_describe(settings, flags.mesh, target, program=flags.program))
    return cli.STATUS_OK


def _prepared_target(flags):
    """Return the target, with the environment in which JAX starts without the hardware."""
    from clover_jax.evaluation.targets import EXAMPLES, parse_target, prepare_environment

    if flags.target is None:
        raise UserError(f"--target is required, such as {EXAMPLES}")
    target = parse_target(flags.target)
    prepare_environment(target, os.environ)  # before JAX is imported
    return target


COMMANDS = {"decode": (decode, define_decode_flags), "train": (train, define_train_flags)}


def main(argv) -> int:
    """Run the command that the first argument names; the others are its flags."""
    name, *rest = argv or ["--help"]
    if name in COMMANDS:
        return cli.run(*COMMANDS[name], rest)
    if name in cli.HELP:
        print(__doc__)
        return cli.STATUS_OK
    print(f"experiments.aot: {name!r} is not a command; use decode or train", file=sys.stderr)
    return cli.STATUS_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
