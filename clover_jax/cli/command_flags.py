"""A command's flags: parsed from arguments and flagfiles, the common ones defined once.

Flag values belong to one run, never to absl's global ones: importing a command defines nothing, and
one process can run several commands.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from clover_jax.errors import UserError


def parse_flags(
    define_flags: Callable[[absl_flags.FlagValues], None], argv: Sequence[str]
) -> absl_flags.FlagValues:
    """Return the flag values of `argv`; `flags.flagfile` lists the flagfiles it named.

    Raises:
      UserError: for an argument that is no flag.
      absl.flags.Error: for an unknown flag or a bad value.
      OSError: for an unreadable flagfile.
    """
    flagfiles = _flagfile_names(argv)
    for name in flagfiles:
        Path(name).expanduser().open().close()  # a clearer error than absl's
    values = defined(define_flags)
    values.set_gnu_getopt(True)  # so that flags after a stray argument are still checked
    try:
        stray = values(["clover_jax", *argv])[1:]
    except absl_flags.CantOpenFlagFileError as error:  # one that a flagfile names
        raise UserError(
            f"{str(error).removeprefix('ERROR:: ')}; a flagfile's name in a flagfile is relative "
            f"to the working directory, here {Path.cwd()}: start where it is found"
        ) from error
    if stray:
        raise UserError(f"unexpected argument {stray[0]!r}: flags are written --name=value")
    # absl replaces --flagfile by the file's lines; the names are wanted for the default workdir.
    values.flagfile = flagfiles
    # Libraries below (grain, orbax) look at absl's global flags and insist that they were parsed.
    if not absl_flags.FLAGS.is_parsed():
        absl_flags.FLAGS.mark_as_parsed()
    return values


def define_common_flags(flags: absl_flags.FlagValues) -> None:
    """Define the flags that mean the same in every command."""
    define_text = absl_flags.DEFINE_string
    define_text(
        "base",
        "builtin:tiny",
        "the base model: a Hugging Face folder or hub id, or shape:NAME for random weights",
        flag_values=flags,
    )
    absl_flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16"],
        "dtype of weights and activations; auto is float32 on CPU and bfloat16 elsewhere",
        flag_values=flags,
    )
    define_text(
        "mesh",
        None,
        'devices along each axis, such as "data=2,fsdp=-1"; -1 takes the rest',
        flag_values=flags,
    )
    absl_flags.DEFINE_integer(
        "seed",
        0,
        "the seed of everything random",
        lower_bound=0,
        upper_bound=2**32 - 1,  # JAX would drop what lies above
        flag_values=flags,
    )
    define_text(
        "workdir",
        None,
        "folder for what a run keeps [runs/ and the flagfile's name]",
        flag_values=flags,
    )


def define_template_flag(flags: absl_flags.FlagValues) -> None:
    """Define which chat template conversations go through."""
    absl_flags.DEFINE_string(
        "chat_template",
        None,
        "a Jinja file, or vicuna or baichuan2 [the base's own]",
        flag_values=flags,
    )


def workdir_of(flags: absl_flags.FlagValues, command: str) -> Path:
    """Return `--workdir`, else runs/<flagfile stem> (several joined by "+"), else runs/<command>.

    Example: `--flagfile=experiments/clover2.flags` gives runs/clover2.
    """
    if flags.workdir:
        return Path(flags.workdir).expanduser()
    return Path("runs", "+".join(Path(name).stem for name in flags.flagfile) or command)


def flag_settings(flags: absl_flags.FlagValues, *leave_out: str) -> dict[str, Any]:
    """Return the value of every flag not in `leave_out`, for manifests and provenance."""
    skipped = {"flagfile", *leave_out}
    return {name: flags[name].value for name in sorted(flags) if name not in skipped}


def defined(define_flags: Callable[[absl_flags.FlagValues], None]) -> absl_flags.FlagValues:
    """Return flag values, not yet parsed, on which `define_flags` has defined its flags."""
    values = absl_flags.FlagValues()
    define_flags(values)
    absl_flags.DEFINE_multi_string(
        "flagfile",
        [],
        "read flags from this file, one a line; what comes later wins",
        flag_values=values,
    )
    return values


def _flagfile_names(argv: Sequence[str]) -> list[str]:
    names = []
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("--flagfile", "-flagfile"):
            names.extend([value] if equals else argv[index + 1 : index + 2])
    return names
