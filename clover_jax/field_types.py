"""Settings, each declared once: a dataclass field with its type, default, help and bounds.

    @dataclasses.dataclass(frozen=True)
    class RunSettings(CommonSettings):
        seq_len: int = setting(512, "tokens of a training row", group="data", least=2)

        def __post_init__(self):
            check_settings(self)

`cli.command_flags.define_settings(flags, RunSettings)` defines a flag for every such field, and
`settings_from(flags, RunSettings)` reads them back; a field without `setting` has no flag.
`check_values` applies the bounds of the flags to values that a program passes.

Nothing here imports JAX, so `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from clover_jax.config import JsonConfig
from clover_jax.errors import UserError

COMMON = "common flags"
_BOOLS = {"true": True, "false": False}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple: "several of them",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The declaration of a setting, in addition to the field's type and default.

    group: the heading under which `--help` lists it.
    least, most: the bounds of a number.
    choices: the values that a text may have; () allows any.
    repeated: the flag is repeated for several texts, instead of separating them with commas.
    may_change: a resumed run may have another value.
    """

    help: str
    group: str = "flags"
    least: float = 0
    most: float = math.inf
    choices: tuple[str, ...] = ()
    repeated: bool = False
    may_change: bool = False


def setting(default: Any, help: str, **details: Any) -> Any:
    """Return a dataclass field with its default, the help of its flag and fields of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **details)})


def declared_settings(kind: type) -> dict[str, Setting]:
    """Return field name -> declaration of every field of a dataclass made with `setting`."""
    declared = {field.name: field.metadata.get("setting") for field in dataclasses.fields(kind)}
    return {name: found for name, found in declared.items() if found is not None}


@dataclasses.dataclass(frozen=True)
class BaseSettings(JsonConfig):
    """The base model and its dtype."""

    base: str = setting(
        "builtin:tiny",
        "the base model: a folder, a hub id, a GGUF file, or shape:NAME for random weights",
        group=COMMON,
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and activations; auto is float32 on CPU and bfloat16 elsewhere",
        group=COMMON,
        choices=("auto", "float32", "bfloat16"),
    )


@dataclasses.dataclass(frozen=True)
class CommonSettings(BaseSettings):
    """The settings of every command that computes with a base."""

    seed: int = setting(
        0,
        "random seed",
        group=COMMON,
        most=2**32 - 1,  # JAX would drop higher bits
    )


@dataclasses.dataclass(frozen=True)
class ChatSettings(JsonConfig):
    """The setting of every command that renders conversations."""

    chat_template: str | None = setting(
        None, "a Jinja file, or vicuna or baichuan2 [the base's own]", group="data"
    )


def check_settings(settings: Any) -> None:
    """Raise UserError for the first field whose type, choice or bound is not as declared."""
    check_values(type(settings), vars(settings))


def check_values(kind: type, values: Mapping[str, Any]) -> None:
    """Raise UserError for the first of these values that a field of `kind` does not accept."""
    # Types first, since bounds compare numbers.
    check_types(kind, values)
    for name, declared in declared_settings(kind).items():
        value = values.get(name)
        # None is unset, and a bool, which Python counts as a number, has no bounds.
        if value is None or isinstance(value, bool):
            continue
        if declared.choices and value not in declared.choices:
            raise UserError(f"{name} {value!r} is not one of {', '.join(declared.choices)}")
        # Written so that NaN, which compares with nothing, is refused too.
        if isinstance(value, int | float) and not value >= declared.least:
            raise UserError(f"{name} ({value}) must be at least {declared.least}")
        if isinstance(value, int | float) and not (value <= declared.most and math.isfinite(value)):
            raise UserError(f"{name} ({value}) must be at most {declared.most}, and finite")


def check_unread(settings: Any, names: Sequence[str], reader: str, is_on: bool) -> None:
    """Raise UserError for a setting that is not at its default while its only reader is off.

    reader: the flag that reads the settings. is_on: whether it is given.
    """
    # A flag that would do nothing is a misunderstanding.
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if not is_on and value != defaults[name]:
            raise UserError(f"--{name}={value} is for --{reader}, which is missing")


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Raise UserError for the first of these values that its field's annotation does not allow."""
    for name, kinds in field_kinds(kind).items():
        if name not in values:
            continue
        # To isinstance True is an int too; here a bool passes as a bool only. An int is a float.
        value = values[name]
        allowed = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(_WORDS.get(kind, "None") for kind in kinds)
            raise UserError(f"{name} must be {wanted}, not {value!r}")


@functools.cache
def field_kinds(settings: type) -> dict[str, tuple[type, ...]]:
    """Return field name -> the types of its annotation: (int, NoneType) for `int | None`."""
    kinds = {}
    for name, hint in typing.get_type_hints(settings).items():
        # isinstance cannot check tuple[int, ...], only its class, tuple.
        hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = tuple(typing.get_origin(one) or one for one in hints)
    return kinds


def parse_values(given: str, text: str, known: dict[str, type], unknown: str) -> dict[str, Any]:
    """Return the values that "name=value,..." sets, each converted to its type.

    given: the words before the text in an error, such as "--loss=". unknown: the beginning of the
        message about an unknown name.
    Raises UserError, with a list of the known names, for an unknown name or a bad value.
    """
    options: dict[str, Any] = {}
    # Empty items, from a comma too many, are skipped.
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, value = item.partition("=")
        problem = None
        if not equals:
            problem = f"{item!r} is not written name=value"
        elif name not in known:
            problem = f"{unknown} {name!r}"
        elif name in options:
            problem = f"{name} is given twice"
        else:
            try:
                # bool("false") is True, so that the two words are looked up instead.
                options[name] = _BOOLS[value.lower()] if known[name] is bool else known[name](value)
            except (KeyError, ValueError):
                wanted = "true or false" if known[name] is bool else known[name].__name__
                problem = f"{name} must be {wanted}, not {value!r}"

        if problem is not None:
            listed = ", ".join(f"{name}={hint.__name__.upper()}" for name, hint in known.items())
            raise UserError(f"{given}{text}: {problem}; the options are {listed}")
    return options
