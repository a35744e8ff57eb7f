"""Measure drafts against plain decoding: same prompts, same process, in turns.

    python -m clover_jax.evaluate --drafts=a=runs/a,b=runs/b --prompts=spec_bench.jsonl --output=out

Plain decoding (`vanilla` in file names and report.json) and every draft decode every task of the
prompts in turns, --repeats times; another method begins each time. The output folder then holds
report.md and report.json (tau, hit rates, accuracies, speed-up with its spread, equality with plain
decoding, a manifest), plots/, and rows/NAME.jsonl. The same command goes on where it was stopped.

--compare=A,B sets two such folders (or their report.json) side by side instead.

Status 1: rows failed, or a draft's text is not that of plain decoding although it should be.
"""

import sys

from absl import flags as absl_flags

from clover_jax import cli
from clover_jax.cli.decoding_flags import define_decoding_flags, generation_settings, model_spec


def define_flags(flags):
    """Define this command's flags."""

    def text(name, default, meaning):
        absl_flags.DEFINE_string(name, default, meaning, flag_values=flags)

    def whole(name, default, meaning):
        absl_flags.DEFINE_integer(name, default, meaning, lower_bound=1, flag_values=flags)

    text(
        "drafts",
        None,
        "NAME=DIR,NAME=DIR or DIR,DIR: the drafts to measure, each as generate's --draft",
    )
    text(
        "tree",
        None,
        "drafted tree of all drafts, or NAME=TREE,NAME=TREE: paper25, chain:P, "
        "dynamic:NODES:DEPTH:WIDTH, clover4, file:PATH, auto (measured) [the one the draft was "
        "measured with, or paper25]",
    )
    text(
        "prompts", None, "file of prompt rows, .jsonl (also .gz, .xz) [those of the base's folder]"
    )
    text("output", None, "folder for the report [the workdir]")
    whole("batch_size", 8, "rows decoded at once; on a mesh more, if its devices cannot share them")
    text("batch_sizes", None, "further batch sizes at which speed is measured, such as 1,4,16")
    whole("repeats", 3, "times that everything is decoded, for the spread of the speed-up")
    whole("limit_prompts", None, "rows of each task at most [all]")
    absl_flags.DEFINE_bool(
        "overwrite", False, "start the output folder anew, whatever is there", flag_values=flags
    )
    text("compare", None, "A,B: two reports to set side by side; nothing is decoded")
    define_decoding_flags(flags)
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    if flags.compare is not None:
        from clover_jax.evaluation.compare import compare_reports

        cli.report(compare_reports(flags.compare, flags.output))
        return cli.STATUS_OK
    result = execute(flags)
    cli.report(result)
    return cli.STATUS_SOME_FAILED if result["problems"] else cli.STATUS_OK


def execute(flags) -> dict:
    """Measure what the flags ask for and return the report's key figures."""
    from clover_jax.evaluation.options import Options
    from clover_jax.evaluation.run import evaluate

    names = (
        *("drafts", "tree", "prompts", "batch_size", "batch_sizes", "repeats", "limit_prompts"),
        *("seed", "overwrite"),
    )
    output = flags.output or str(cli.workdir_of(flags, "evaluate"))
    spec = model_spec(flags, tree=None)  # --tree is for the drafts
    options = Options(spec, output=output, **{name: flags[name].value for name in names})
    settings = cli.flag_settings(flags, "compare", "overwrite")
    return evaluate(options, generation_settings(flags), settings)


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
