"""Convert a draft head between our draft directories and the layouts of other programs.

The input is a draft directory, a training workdir, a hub id or a folder in an official layout,
which is recognised; --to says what is written:

  orbax        a draft directory of this program
  clover2      the official Clover-2 layout
  eagle        the official EAGLE-1 and -2 layout

Every tensor is accounted for, values are kept bit for bit, and nothing is written unless all of it
can be.
"""

import sys

from clover_jax import cli

TARGETS = ("orbax", "clover2", "eagle")


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
    define("bool", "overwrite", False, "replace what is at --output")
    cli.define_common_flags(flags)


def main(flags) -> int:
    """Run the command."""
    from clover_jax.errors import UserError
    from clover_jax.interchange.conversion import ConvertOptions, convert

    for name in ("input", "output"):
        if not flags[name].value:
            raise UserError(f"--{name} is missing; give the folder")
    names = [field for field in ConvertOptions.__dataclass_fields__ if field in flags]
    cli.report(convert(ConvertOptions(**{name: flags[name].value for name in names})))
    return cli.STATUS_OK


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
