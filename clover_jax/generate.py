"""Decode: continue one prompt as you watch, or a file of prompts into a file of rows.

With --draft the tokens of several steps come at once: the draft head proposes, the base verifies,
and the text is the base's own. Without one the same engine decodes plainly. Without --prompt and
--prompts it continues the first prompt that came with the base. A command that was stopped goes on
where it was when it is repeated with the same --output.
"""

import sys

from clover_jax import cli


def define_flags(flags):
    """Define this command's flags."""
    from absl import flags as absl_flags

    def define(kind, name, default, help_text, **limits):
        getattr(absl_flags, f"DEFINE_{kind}")(name, default, help_text, flag_values=flags, **limits)

    def choose(name, default, choices, help_text):
        absl_flags.DEFINE_enum(name, default, choices, help_text, flag_values=flags)

    define("string", "prompt", None, "text to continue")
    define("string", "prompts", None, "file of prompt rows, .jsonl or .jsonl.gz")
    define(
        "string",
        "draft",
        "none",
        "a draft directory, a training workdir, or a folder in an official layout; none decodes "
        "plainly",
    )
    define("float", "draft_rope_theta", None, "rotary base for a layout that does not say it")
    define("bool", "allow_base_mismatch", False, "use a draft that was trained for another base")
    define(
        "string",
        "tree",
        None,
        "drafted tree: paper25, chain:P, dynamic:NODES, clover4, file:PATH [the one the draft was "
        "measured with, or paper25]",
    )
    define("integer", "max_new_tokens", 128, "tokens to emit at most, a turn", lower_bound=1)
    define("float", "temperature", 0.0, "0 takes the most probable token", lower_bound=0.0)
    define("integer", "top_k", 0, "draw from this many tokens at most; 0: from all", lower_bound=0)
    define(
        "float",
        "top_p",
        1.0,
        "draw from the most probable tokens up to this mass",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    choose(
        "verify",
        None,
        ["greedy", "lossless", "typical"],
        "how drafted tokens are accepted [greedy at temperature 0, else lossless]: lossless text "
        "has the distribution of plain sampling; typical is Medusa's rule and is not lossless",
    )
    choose(
        "draft_sampling",
        "topk",
        ["topk", "sampled"],
        "children by probability, or drawn from the draft (static trees)",
    )
    define("multi_string", "stop", [], "end the text before this; may be given again")
    define("bool", "ignore_eos", False, "go on after an end-of-sequence token")
    choose(
        "context_overflow",
        "error",
        ["error", "truncate_left", "skip"],
        "what becomes of a prompt that is longer than the base's context",
    )
    define("integer", "batch_size", 8, "rows decoded at once, with --prompts", lower_bound=1)
    define("string", "output", None, "file for the rows [stdout, with --prompts]")
    define("bool", "overwrite", False, "start --output anew, whatever is there")
    define("bool", "strict", False, "stop at the first row that fails")
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    from clover_jax.generation.run import Options, run
    from clover_jax.generation.settings import GenerationSettings

    settings = GenerationSettings(
        max_new_tokens=flags.max_new_tokens,
        ignore_eos=flags.ignore_eos,
        context_overflow=flags.context_overflow,
        verify=flags.verify,
        draft_sampling=flags.draft_sampling,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        stop=tuple(flags.stop),
    )
    names = (
        *("prompt", "prompts", "base", "draft", "tree", "dtype", "mesh", "batch_size", "seed"),
        *("output", "overwrite", "strict", "allow_base_mismatch", "draft_rope_theta"),
    )
    result = run(Options(**{name: flags[name].value for name in names}), settings)
    cli.report(result)
    return cli.STATUS_SOME_FAILED if result["failed"] else cli.STATUS_OK


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
