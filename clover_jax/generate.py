"""Decode: continue one prompt on the terminal, or decode a file of prompts into a file of rows.

With --draft several tokens are emitted at once: the draft head proposes, the base verifies, and the
text is the base's own. Without it each forward emits one token. Without --prompt and --prompts it
continues the first prompt in the base's folder. Repeat a stopped command with the same --output to
resume it. Several processes decode as one if the environment says so (launch/local_processes); one
of them reads prompts and writes rows.
"""

import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.row_settings import GenerateOptions, GenerationSettings
from clover_jax.decoding.spec import ModelSpec


def define_flags(flags):
    """Define this command's flags."""
    # In the order in which --help lists them.
    for kind in (GenerateOptions, ModelSpec, GenerationSettings):
        define_settings(flags, kind)
    cli.define_common_flags(flags, "workdir")


def main(flags) -> int:
    """Run the command."""
    from clover_jax.decoding.generate_run import run
    from clover_jax.runtime.distributed import joined_processes, primary_speaks
    from clover_jax.training.adapting import adapting

    settings, spec = settings_from(flags, GenerationSettings), settings_from(flags, ModelSpec)
    options = settings_from(flags, GenerateOptions, spec=spec, seed=flags.seed)
    # All processes decode; only the primary prints.
    with joined_processes(), primary_speaks():
        result = run(options, settings, adapting)
        cli.report(result)
    return cli.STATUS_SOME_FAILED if result["failed"] else cli.STATUS_OK


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
