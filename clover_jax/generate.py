"""Decode: continue one prompt as you watch, or a file of prompts into a file of rows.

With --draft the tokens of several steps come at once: the draft head proposes, the base verifies,
and the text is the base's own. Without one the same engine decodes plainly. Without --prompt and
--prompts it continues the first prompt that came with the base. A command that was stopped goes on
where it was when it is repeated with the same --output.
"""

import sys

from clover_jax import cli
from clover_jax.cli.decoding_flags import define_decoding_flags, generation_settings, model_spec


def define_flags(flags):
    """Define this command's flags."""
    from absl import flags as absl_flags

    def define(kind, name, default, help_text, **limits):
        getattr(absl_flags, f"DEFINE_{kind}")(name, default, help_text, flag_values=flags, **limits)

    define("string", "prompt", None, "text to continue")
    define(
        "string",
        "prompts",
        None,
        "file of prompt rows, .jsonl (also .gz, .xz); - is standard input",
    )
    define(
        "string",
        "draft",
        "none",
        "a draft directory, a training workdir, or a folder in an official layout; none decodes "
        "plainly",
    )
    define(
        "string",
        "tree",
        None,
        "drafted tree: paper25, chain:P, dynamic:NODES:DEPTH:WIDTH (the NODES most probable of "
        "DEPTH levels [6], each WIDTH [8] wide), clover4, file:PATH, or auto: what pays, by "
        "measurement [the one the draft was measured with, or paper25]",
    )
    define(
        "string", "calibration", None, "prompt rows for --tree=auto [the base's own, or shipped]"
    )
    define_decoding_flags(flags)
    define("integer", "batch_size", 8, "rows decoded at once, with --prompts", lower_bound=1)
    define("string", "output", None, "file for the rows [stdout, with --prompts]")
    define("bool", "overwrite", False, "start --output anew, whatever is there")
    define("bool", "strict", False, "stop at the first row that fails")
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    from clover_jax.generation.run import GenerateOptions, run

    settings = generation_settings(flags)
    names = (
        *("prompt", "prompts", "batch_size", "seed", "output", "overwrite", "strict"),
        "calibration",
    )
    options = GenerateOptions(model_spec(flags), **{name: flags[name].value for name in names})
    result = run(options, settings)
    cli.report(result)
    return cli.STATUS_SOME_FAILED if result["failed"] else cli.STATUS_OK


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
