"""The flags of a command: defined from settings, parsed from arguments, listed by `--help`.

Flag values belong to one run, never to absl: one process can import and run several commands.
"""

import dataclasses
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags as absl_flags

from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import (
    COMMON,
    CommonSettings,
    Setting,
    check_values,
    declared_settings,
    field_kinds,
    setting,
)

S = TypeVar("S")


def parse_flags(
    define_flags: Callable[[absl_flags.FlagValues], None], argv: Sequence[str]
) -> absl_flags.FlagValues:
    """Return the flag values of `argv`; `flags.flagfile` lists the flagfiles that it names.

    Raises UserError for an argument that is not a flag and for a flagfile that cannot be read,
    absl.flags.Error for an unknown flag or a bad value.
    """
    # Both forms that absl takes: --flagfile=FILE and --flagfile FILE.
    flagfiles: list[str] = []
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("--flagfile", "-flagfile"):
            flagfiles.extend([value] if equals else argv[index + 1 : index + 2])

    values = defined(define_flags)
    values.set_gnu_getopt(True)  # so that flags after a stray argument are still checked
    try:
        stray = values(["clover_jax", *argv])[1:]
    except absl_flags.CantOpenFlagFileError as error:
        raise UserError(f"{str(error).removeprefix('ERROR:: ')}; from {Path.cwd()}") from error
    if stray:
        raise UserError(f"unexpected argument {stray[0]!r}: flags are written --name=value")
    # absl replaces --flagfile with the file's lines; the default workdir needs the names.
    values.flagfile = flagfiles  # type: ignore[assignment]  # absl's stub takes no value at all
    # grain and orbax read absl's global flags and insist that they were parsed.
    if not absl_flags.FLAGS.is_parsed():
        absl_flags.FLAGS.mark_as_parsed()
    return values


def define_settings(flags: absl_flags.FlagValues, kind: type, *names: str) -> None:
    """Define a flag for every field made with `field_types.setting`, or for the named ones.

    Type, default, help, bounds and group are the field's. A flag that is there stays as it is.
    """
    kinds = field_kinds(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, declared in declared_settings(kind).items():
        if name not in flags and (not names or name in names):
            _define(flags, name, kinds[name], defaults[name], declared)
            flag: Any = flags[name]  # absl's own flags have no group
            flag.group = declared.group


def _define(
    flags: absl_flags.FlagValues, name: str, kinds: tuple, default: Any, declared: Setting
) -> None:
    shared: dict[str, Any] = {"default": default, "help": declared.help, "flag_values": flags}
    # absl's message would show an infinite bound.
    most = None if math.isinf(declared.most) else declared.most
    bounds: dict[str, Any] = {"lower_bound": declared.least, "upper_bound": most}

    if tuple in kinds:
        define = absl_flags.DEFINE_multi_string if declared.repeated else absl_flags.DEFINE_list
        define(name, **(shared | {"default": list(default)}))
    elif bool in kinds:
        absl_flags.DEFINE_bool(name, **shared)
    elif int in kinds:
        absl_flags.DEFINE_integer(name, **shared, **bounds)
    elif float in kinds:
        absl_flags.DEFINE_float(name, **shared, **bounds)
    elif declared.choices:
        absl_flags.DEFINE_enum(name, **shared, enum_values=list(declared.choices))
    else:
        absl_flags.DEFINE_string(name, **shared)


def settings_from(flags: absl_flags.FlagValues, kind: type[S], **others: Any) -> S:
    """Return the settings of the flags that `define_settings(flags, kind)` defined.

    others: values of fields without a flag, or instead of the flag's.
    """
    # absl has lists; frozen settings hold tuples.
    given = {name: flags[name].value for name in declared_settings(kind) if name in flags}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    # A program's values come without the parser's checks: `flags_of`.
    check_values(kind, given)
    return kind(**(given | others))


def flags_of(
    define_flags: Callable[[absl_flags.FlagValues], None], given: Mapping[str, Any]
) -> absl_flags.FlagValues:
    """Return flags with these values, None for unset; raises UserError for an unknown name."""
    flags = defined(define_flags)
    for name, value in given.items():
        if name not in flags or name == "flagfile":
            known = ", ".join(sorted(set(flags) - {"flagfile"}))
            raise UserError(f"{name!r} is not a setting; the settings are {known}")
        if value is None:
            continue
        flag = flags[name]
        if isinstance(flag.default, list):
            # One text may stand for a list of one, or have commas.
            is_repeated = isinstance(flag, absl_flags.MultiFlag)
            texts = [value] if is_repeated else str(value).split(",")
            value = list(map(str, value)) if isinstance(value, list | tuple) else texts
        elif flag.flag_type().startswith("string"):
            # A path, or several values that the command separates with commas.
            value = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        flag.value = value
    flags.mark_as_parsed()
    return flags


IDLE = "accepted by every command; no effect in this one"


@dataclasses.dataclass(frozen=True)
class _CommonFlags(CommonSettings):
    workdir: str | None = setting(
        None, "output folder of a run [runs/NAME for --flagfile=NAME.flags]", group=COMMON
    )


@dataclasses.dataclass(frozen=True)
class _Flagfiles:
    flagfile: tuple[str, ...] = setting(
        (),
        "read flags from this file, one a line; what comes later wins",
        group=COMMON,
        repeated=True,
    )


def define_common_flags(flags: absl_flags.FlagValues, *idle: str) -> None:
    """Define the flags of every command; idle: the ones that have no effect on this one."""
    define_settings(flags, _CommonFlags)
    define_settings(flags, ModelSpec, "mesh")
    for name in idle:
        flags[name].help = IDLE


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
    """Return flag values, not yet parsed, with the flags that `define_flags` defines."""
    values = absl_flags.FlagValues()
    define_flags(values)
    define_settings(values, _Flagfiles)
    return values


_PLACEHOLDER = {"string": "TEXT", "int": "N", "float": "X"}
_INDENT = " " * 4

# Rarely needed groups: `--help` counts their flags, `--help=all` lists them.
RARE = ("memory", "dry run", "third-party drafts")


def help_text(
    command: str, description: str, flags: absl_flags.FlagValues, everything: bool = False
) -> str:
    """Return the help of a command, folded to the terminal; everything: list groups of RARE too."""
    width = min(shutil.get_terminal_size().columns, 100)
    groups: dict[str, list[absl_flags.Flag]] = {}
    for name in flags:
        groups.setdefault(getattr(flags[name], "group", "flags"), []).append(flags[name])
    # The flags of every command come last.
    groups[COMMON] = groups.pop(COMMON, [])

    parts = [f"usage: python -m {command} [--flag=value ...]", textwrap.dedent(description).strip()]
    left_out = 0
    for title, group in groups.items():
        if title in RARE and not everything:
            left_out += len(group)
        elif group:
            parts.append("\n".join([f"{title}:", *(_flag_help(flag, width) for flag in group)]))
    if left_out:
        parts.append(f"rarely needed flags, {left_out} more: --help=all")
    return "\n\n".join(parts)


def _flag_help(flag: absl_flags.Flag, width: int) -> str:
    # absl wraps the text, and repeats what the usage line shows.
    meaning = " ".join((flag.help or "").split())
    meaning = meaning.removesuffix("; repeat this option to specify a list of values")
    meaning = re.sub(r"^<[^>]*>: ", "", meaning)
    if flag.default not in (None, "", []):
        meaning += f" [{(flag.default_as_str or '').strip(chr(39))}]"
    folded = textwrap.fill(meaning, width, initial_indent=_INDENT, subsequent_indent=_INDENT)

    if flag.boolean:
        return f"  --[no]{flag.name}\n{folded}"
    choices = getattr(flag.parser, "enum_values", None)
    value = "|".join(choices) if choices else _PLACEHOLDER.get(flag.parser.flag_type(), "VALUE")
    return f"  --{flag.name}={value}\n{folded}"
