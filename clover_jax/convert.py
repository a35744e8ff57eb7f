"""Convert a draft head between our draft directories and third-party layouts.

The input is a draft directory, a training workdir, a hub id or a folder in an official layout,
which is recognized; --to selects the layout to write:

  orbax         a draft directory of this program
  clover2       the official Clover-2 layout
  eagle         the official EAGLE-1 and -2 layout
  eagle_vllm    the same for vLLM's method "eagle", whose fc has no bias
  eagle_sglang  the same for SGLang, which has another name for it
  eagle3        the official EAGLE-3 layout, which SGLang and vLLM read too
  eagle3_tpu    the same for tpu-inference's JAX models
  dflash2       a DFlash 2 or DFlash head as vLLM, SGLang and llama.cpp read it
  mtp           the drafting layer of a Qwen3-Next or Qwen3.5, as its folder has it
  medusa        the original Medusa layout; medusa_vllm is vLLM's
  speculators   vLLM's speculators: EAGLE-3, or EAGLE-1 as in the library's first version

Every tensor is accounted for, values are kept bit for bit, and nothing is written unless the whole
head can be. To publish the result: hf upload OWNER/NAME OUTPUT.
"""

import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation.options import ConvertOptions
from clover_jax.runtime.progress import say


def define_flags(flags):
    """Define this command's flags."""
    define_settings(flags, ConvertOptions)
    define_settings(flags, ModelSpec, "draft_rope_theta", "allow_base_mismatch")
    cli.define_common_flags(flags, "workdir", "seed", "mesh")


def main(flags) -> int:
    """Run the command."""
    report = execute(flags)
    # On stderr: stdout has only the line of JSON.
    if flags.verify:
        taus = f"tau {report['tau_source']:.3f} before and {report['tau_result']:.3f} after"
        differing, prompts = len(report["differing"]), report["prompts"]
        if differing:
            say(f"{taus}: {differing} of {prompts} prompts differ, so nothing was written")
        else:
            say(f"{taus}: the same accepted lengths on all {prompts} prompts")
    cli.report(report)
    return cli.STATUS_SOME_FAILED if report.get("differing") else cli.STATUS_OK


def execute(flags) -> dict:
    """Convert a head as the flags specify and return the report."""
    from clover_jax.evaluation.conversion import convert

    spec = settings_from(flags, ModelSpec, mesh=None)  # it is verified on one device
    return convert(settings_from(flags, ConvertOptions, spec=spec))


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
