"""Prepare training data: tokenized and masked, with answers of the base, or with its activations.

    python -m clover_jax.prepare --data=chats.jsonl --base=DIR --preview
    python -m clover_jax.prepare --data=chats.jsonl --base=DIR --output=runs/data
    python -m clover_jax.train --data=runs/data --base=DIR

Data (--data): paths or globs, comma-separated, of text files, JSON lines or lists (also
compressed), Parquet and Arrow tables, with rows of conversations (ShareGPT), messages, prompt and
response, text, or the prompt_ids and output_ids that `generate --output` writes. The loss covers
the assistant's tokens, or all tokens of a plain text; one record in twenty, chosen by a hash of its
content, is held out.

The folder holds ArrayRecord shards and manifests: train.json, heldout.json and, with --features,
hidden.json. The same command resumes a stopped run. Training on the folder uses the same batches as
training on the raw files; `train --teacher=cached` also reads the activations. Several processes
regenerate answers and compute activations as one if the environment says so
(launch/local_processes); one of them writes the folder, which all must see for --features.
"""

import sys

from absl import flags as absl_flags

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.sampling_config import SamplingParams
from clover_jax.decoding.spec import ModelSpec
from clover_jax.training.settings import PrepareOptions, TrainSettings


def define_flags(flags: absl_flags.FlagValues) -> None:
    """Define the flags of `prepare`."""
    define_settings(flags, PrepareOptions)
    define_settings(flags, TrainSettings, "data", "seq_len")
    define_settings(flags, SamplingParams)
    define_settings(flags, ModelSpec, "chat_template", "draft", "tree", "allow_base_mismatch")
    cli.define_common_flags(flags)


def main(flags: absl_flags.FlagValues) -> int:
    """Prepare and report."""
    from clover_jax.runtime.distributed import joined_processes, primary_speaks

    with joined_processes(), primary_speaks():
        report = execute(flags)
        # Of several processes only the primary has written samples.
        if not flags.preview and "samples" in report:
            print(_summary(report))
        cli.report(report)
    # Rows that failed are left out of the samples, as the caller must learn.
    has_failed = report.get("regenerated", {}).get("failed", 0) > 0
    return cli.STATUS_SOME_FAILED if has_failed else cli.STATUS_OK


def execute(flags: absl_flags.FlagValues) -> dict:
    """Prepare what the flags ask for and return the report."""
    from clover_jax.training.prepare_run import run_prepare

    options = settings_from(
        flags,
        PrepareOptions,
        spec=settings_from(flags, ModelSpec),
        warping=settings_from(flags, SamplingParams),
        seed=flags.seed,
        # Declared by `TrainSettings`, so that both commands mean the same.
        data=flags.data,
        seq_len=flags.seq_len,
        workdir=cli.workdir_of(flags, "prepare"),
    )
    return run_prepare(options)


def _summary(report: dict) -> str:
    size = (report["bytes"] + report.get("feature_bytes", 0)) / 1e9
    return (
        f"{report['samples']} samples ({report['refused']} left out), {report['tokens']} tokens, "
        f"{report['counted']} in the loss, {report['heldout']} held-out records, {size:.2f} GB; "
        f"train with --data={report['output']}"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
