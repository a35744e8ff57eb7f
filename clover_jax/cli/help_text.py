"""What `--help` prints: the command's docstring, its own flags, then the common ones."""

import re
import shutil
import textwrap

from absl import flags as absl_flags

from clover_jax.field_types import COMMON

_PLACEHOLDER = {"string": "TEXT", "int": "N", "float": "X"}
_INDENT = " " * 4

# Rarely needed groups: `--help` counts their flags, `--help=all` lists them.
RARE = ("memory", "dry run", "third-party drafts")


def help_text(
    command: str, description: str, flags: absl_flags.FlagValues, everything: bool = False
) -> str:
    """Return the help of `command`, whose flags are `flags`, folded to the terminal's width.

    everything: list the groups of RARE too.
    """
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
        parts.append(f"{left_out} more flags, rarely needed: --help=all")
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
