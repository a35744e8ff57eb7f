"""Make a small base model from Python sources: tokenizer, weights, held-out prompts, card.

Reads the modules of the interpreter's standard library, trains a byte-level BPE tokenizer and a
Llama-style decoder on them, measures bits per byte on held-out modules, and writes a Hugging Face
folder that --base takes. experiments/tiny_base/tiny.flags made builtin:tiny so. A stopped run goes
on from its last checkpoint when the same command is given again.
"""

import sys

from clover_jax import cli


def define_flags(flags):
    """Define this command's flags."""
    from absl import flags as absl_flags

    def define(kind, name, default, help_text, **limits):
        getattr(absl_flags, f"DEFINE_{kind}")(name, default, help_text, flag_values=flags, **limits)

    define("string", "output", None, "folder to write the base to [WORKDIR/base]")
    define("bool", "overwrite", False, "replace what is at --output")
    define("string", "workdir", None, "folder for checkpoints and metrics [runs/<flagfile stem>]")
    define("string", "sources", None, "folder of Python sources [the standard library]")
    define("list", "packages", [], "installed packages to learn from too, separated by commas")
    define("integer", "seed", 0, "the seed of everything random", lower_bound=0)
    define("integer", "vocab_size", 2048, "tokens of the BPE vocabulary", lower_bound=1)
    define("integer", "hidden_size", 256, "width of the decoder", lower_bound=1)
    define("integer", "intermediate_size", 768, "width of its MLPs", lower_bound=1)
    define("integer", "num_layers", 4, "decoder layers", lower_bound=1)
    define("integer", "num_heads", 4, "query heads", lower_bound=1)
    define("integer", "num_kv_heads", 2, "key/value heads", lower_bound=1)
    define("integer", "steps", 2000, "optimiser steps", lower_bound=1)
    define(
        "float", "minutes", 0.0, "time budget; the schedule ends with it if before --steps. 0: none"
    )
    define("integer", "tokens_per_step", 8192, "tokens of an optimiser step", lower_bound=1)
    define("float", "learning_rate", 0.02, "Muon's peak learning rate", lower_bound=0.0)
    define("float", "embedding_learning_rate", 0.004, "Adam's, for embeddings", lower_bound=0.0)
    define("float", "weight_decay", 0.05, "decoupled weight decay of matrices", lower_bound=0.0)
    define("integer", "log_every", 20, "steps between rows of metrics.jsonl", lower_bound=1)
    define("integer", "checkpoint_every", 100, "steps between checkpoints", lower_bound=1)
    define("integer", "prompts", 200, "held-out prompts to ship with the base", lower_bound=0)


def main(flags) -> int:
    """Run the command."""
    from experiments.tiny_base.pretrain_run import run_pretraining

    workdir = cli.workdir_of(flags, "pretrain")
    settings = cli.flag_settings(
        flags, "workdir", "output", "overwrite", "log_every", "checkpoint_every", "prompts"
    )
    with cli.stop_signals_as_event() as stop:
        result = run_pretraining(flags, settings, workdir, stop)
    cli.report(result)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
