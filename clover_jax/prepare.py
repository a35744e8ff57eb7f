"""Prepare training data: tokenised and masked, with answers of the base, or with its activations.

    python -m clover_jax.prepare --data=chats.jsonl --base=DIR --preview
    python -m clover_jax.prepare --data=chats.jsonl --base=DIR --output=runs/data
    python -m clover_jax.train --data=runs/data --base=DIR

Data (--data): paths or globs, comma-separated, of text files, .jsonl (also .gz, .xz) or .json lists
with rows of conversations (ShareGPT), messages, prompt and response, text, or the prompt_ids and
output_ids that `generate --output` writes. The base is imitated on the assistant's tokens, or on
all of a text; one record in twenty, chosen by a hash of its content, is held out.

The folder holds ArrayRecord shards and manifests: train.json, heldout.json and, with --features,
hidden.json. The same command goes on where it was stopped. Training on the folder gives the very
batches that the raw files would give; `train --teacher=cached` then reads the activations there.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from clover_jax import cli
from clover_jax.cli.command_flags import define_template_flag
from clover_jax.cli.decoding_flags import define_sampling_flags, model_spec
from clover_jax.errors import UserError


def define_flags(flags: absl_flags.FlagValues) -> None:
    """Define the flags of `prepare`."""

    def define(kind, name, default, meaning, **limits):
        getattr(absl_flags, f"DEFINE_{kind}")(name, default, meaning, flag_values=flags, **limits)

    define("string", "data", "builtin:python", "training data: paths or globs, comma-separated")
    define("string", "output", None, "folder to write [the workdir]")
    define("integer", "seq_len", 512, "tokens of a training row", lower_bound=2)
    define(
        "float",
        "max_truncated",
        None,
        "refuse data where a larger share of the conversations is longer than a row [only warn]",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    define_template_flag(flags)
    define(
        "bool", "preview", False, "show some samples with what is imitated marked; write nothing"
    )
    define("integer", "preview_samples", 3, "samples to show", lower_bound=1)
    define(
        "string",
        "features",
        "none",
        "activations to keep for --teacher=cached: a drafter's name for what it is trained on, or "
        "names such as pre_norm,post_norm,layer_2",
    )
    absl_flags.DEFINE_enum(
        "feature_dtype", "bfloat16", ["bfloat16", "float32"], "how they are kept", flag_values=flags
    )
    define("integer", "batch_size", 8, "rows that the base reads at once", lower_bound=1)
    define("bool", "yes", False, "agree to more than 10 GB of activations")
    define("bool", "overwrite", False, "start --output anew, whatever is there")
    define("bool", "regenerate", False, "replace the answers by those that the base itself gives")
    define("string", "draft", "none", "with --regenerate: decode with this draft, for speed")
    define("string", "tree", None, "drafted tree [the one the draft was measured with]")
    define("bool", "allow_base_mismatch", False, "use a draft that was trained for another base")
    define("integer", "max_new_tokens", 512, "tokens of an answer at most", lower_bound=1)
    define_sampling_flags(flags)
    cli.define_common_flags(flags)


def main(flags: absl_flags.FlagValues) -> int:
    """Prepare and report."""
    report = execute(flags)
    if not flags.preview:
        print(_summary(report))
    cli.report(report)
    return 0


def execute(flags: absl_flags.FlagValues) -> dict:
    """Prepare what the flags ask for and return the report."""
    if flags.mesh is not None:
        raise UserError(f"--mesh={flags.mesh}: prepare uses one device; leave --mesh out")
    import dataclasses

    from clover_jax.preparation.options import PrepareOptions
    from clover_jax.preparation.run import run_prepare

    names = [field.name for field in dataclasses.fields(PrepareOptions) if field.name in flags]
    values: dict[str, Any] = {name: flags[name].value for name in names}
    output = flags.output and Path(flags.output).expanduser()
    values["output"] = output or cli.workdir_of(flags, "prepare")
    return run_prepare(PrepareOptions(model_spec(flags), **values))


def _summary(report: dict) -> str:
    size = (report["bytes"] + report.get("feature_bytes", 0)) / 1e9
    return (
        f"{report['samples']} samples ({report['refused']} left out), {report['tokens']} tokens, "
        f"{report['counted']} to learn, {report['heldout']} held-out records, {size:.2f} GB; "
        f"train with --data={report['output']}"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
