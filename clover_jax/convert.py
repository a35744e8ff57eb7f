"""Convert a draft head between our draft directories and the layouts of other programs.

The input is a draft directory, a training workdir, a hub id or a folder in an official layout,
which is recognised; --to says what is written:

  orbax         a draft directory of this program
  clover2       the official Clover-2 layout
  eagle         the official EAGLE-1 and -2 layout
  eagle_vllm    the same for vLLM's method "eagle", whose fc has no bias
  eagle_sglang  the same for SGLang, which has another name for it
  eagle3        the official EAGLE-3 layout, which SGLang reads as well
  medusa        the original Medusa layout; medusa_vllm is vLLM's
  speculators   an EAGLE-3 head as vLLM's speculators describe it; an EAGLE-1 head as they once did

Every tensor is accounted for, values are kept bit for bit, and nothing is written unless all of it
can be.
"""

import sys

from clover_jax import cli

TARGETS = (
    "orbax",
    "clover2",
    "eagle",
    "eagle_vllm",
    "eagle_sglang",
    "eagle3",
    "medusa",
    "medusa_vllm",
    "speculators",
)


def define_flags(flags):
    """Define this command's flags."""
    from absl import flags as absl_flags

    def define(kind, name, default, help_text, **limits):
        getattr(absl_flags, f"DEFINE_{kind}")(name, default, help_text, flag_values=flags, **limits)

    define("string", "input", None, "the head to convert")
    define("string", "output", None, "folder to write")
    absl_flags.DEFINE_enum("to", "orbax", TARGETS, "layout to write", flag_values=flags)
    define("float", "draft_rope_theta", None, "rotary base for a layout that does not say it")
    define("bool", "allow_base_mismatch", False, "convert a draft of another base")
    define("bool", "cut_vocab", False, "leave out rows beyond the base's vocabulary (padding)")
    define("bool", "verify", False, "decode with both heads; fail where accepted lengths differ")
    define("string", "prompts", None, "prompts to verify with [the base's, else of the data]")
    define("integer", "num_prompts", 8, "prompts to verify with, at most", lower_bound=1)
    define("integer", "max_new_tokens", 64, "tokens to decode for each of them", lower_bound=2)
    define("string", "push", None, "hub repository to upload the result to, OWNER/NAME")
    define("bool", "card_only", False, "with --push: write the model card, upload nothing")
    define("string", "base_model", None, "with --push: the base's name on the hub [--base]")
    define("string", "license", None, "with --push: the head's license [the base's]")
    define("bool", "overwrite", False, "replace what is at --output")
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    report = execute(flags)
    if flags.verify:
        print(_verdict(report), file=sys.stderr, flush=True)
    cli.report(report)
    return cli.STATUS_SOME_FAILED if report.get("differing") else cli.STATUS_OK


def execute(flags) -> dict:
    """Convert what the flags ask for and return the report."""
    from clover_jax.conversion.conversion import ConvertOptions, convert
    from clover_jax.errors import UserError

    for name in ("input", "output"):
        if not flags[name].value:
            raise UserError(f"--{name} is missing; give the folder")
    if flags.prompts and not flags.verify:
        raise UserError(f"--prompts={flags.prompts} are for --verify, which is missing")
    names = [field for field in ConvertOptions.__dataclass_fields__ if field in flags]
    return convert(ConvertOptions(**{name: flags[name].value for name in names}))


def _verdict(report: dict) -> str:
    taus = f"tau {report['tau_source']:.3f} before and {report['tau_result']:.3f} after"
    count = len(report["differing"])
    if not count:
        return f"{taus}: the same accepted lengths on all {report['prompts']} prompts"
    return f"{taus}: {count} of {report['prompts']} prompts differ, so nothing was written"


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
