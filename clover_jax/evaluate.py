"""Measure drafts against plain decoding: same prompts, same process, alternately.

    python -m clover_jax.evaluate --drafts=a=runs/a,b=runs/b --prompts=spec_bench.jsonl --output=out

Plain decoding (`vanilla` in file names and report.json), every draft, and every training-free
baseline (--baselines) decode every task of the prompts, --repeats times; the first method changes
each time. The output folder then has report.md and report.json (tau, hit rates, accuracies,
speed-up with its spread, equality with plain decoding, a manifest), plots/, and rows/NAME.jsonl.
The same command continues a run that was stopped.

Rows of training data in the `messages` form are prompts too: a final assistant message is dropped.
--compare=A,B compares two such folders (or their report.json) instead.

Several processes measure as one where the environment is set for that (launch/local_processes);
one of them reads the prompts and writes the folder.

Status 1: rows failed, or a draft's text differs from plain decoding's although it should not.
"""

import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation.options import Options

_SPEC = ("copy", "copy_from", "int8", "chat_template", "draft_rope_theta", "allow_base_mismatch")


def define_flags(flags):
    """Define this command's flags."""
    define_settings(flags, Options)
    define_settings(flags, ModelSpec, *_SPEC)  # drafts and their trees are in `Options`
    define_settings(flags, GenerationSettings)
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    if flags.compare is not None:
        from clover_jax.evaluation.compare import compare_reports

        cli.report(compare_reports(flags.compare, flags.output))
        return cli.STATUS_OK
    from clover_jax.runtime.distributed import joined_processes, primary_speaks

    with joined_processes(), primary_speaks():
        result = execute(flags)
        cli.report(result)
    return cli.STATUS_SOME_FAILED if result["problems"] else cli.STATUS_OK


def execute(flags) -> dict:
    """Measure what the flags ask for and return the report's key figures."""
    options = settings_from(
        flags,
        Options,
        spec=settings_from(flags, ModelSpec, tree=None),  # --tree is for the drafts
        seed=flags.seed,
        workdir=cli.workdir_of(flags, "evaluate"),
    )
    # The report records all flags that a measurement may depend on.
    recorded = cli.flag_settings(flags, "compare", "overwrite")
    from clover_jax.evaluation.run import evaluate

    return evaluate(options, settings_from(flags, GenerationSettings), recorded)


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
