"""Make a small base model from Python sources: tokenizer, weights, held-out prompts, card.

Reads the modules of the interpreter's standard library, trains a byte-level BPE tokenizer and a
Llama-style decoder on them, measures bits per byte on held-out modules, and writes a Hugging Face
folder that --base takes. experiments/tiny_base/tiny.flags made builtin:tiny so. A stopped run goes
on from its last checkpoint when the same command is given again.
"""

import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from experiments.tiny_base.settings import PretrainConfig, PretrainOptions


def define_flags(flags):
    """Define this command's flags."""
    define_settings(flags, PretrainOptions)
    define_settings(flags, PretrainConfig)


def main(flags) -> int:
    """Run the command."""
    from experiments.tiny_base.pretrain_run import run_pretraining

    workdir = cli.workdir_of(flags, "pretrain")
    settings = cli.flag_settings(
        flags, "workdir", "output", "overwrite", "log_every", "checkpoint_every", "prompts"
    )
    # Gradients of parts of a step are summed, so that activations stay in cache.
    part = min(PretrainConfig.tokens_per_part, flags.tokens_per_step)
    config = settings_from(flags, PretrainConfig, tokens_per_part=part)
    options = settings_from(flags, PretrainOptions)
    with cli.stop_signals_as_event() as stop:
        result = run_pretraining(options, config, settings, workdir, stop)
    cli.report(result)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
