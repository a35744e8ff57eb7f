"""What the fields of settings may hold, by their annotations: a caller's values come unchecked."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

from clover_jax.errors import UserError

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple: "several of them",
}


def check_types(settings: Any) -> None:
    """Raise UserError naming the first field of a dataclass that is not what its annotation says.

    A whole number is a number too, True is none.
    """
    for name, kinds in _fields(type(settings)).items():
        value = getattr(settings, name)
        if not any(_is_a(kind, value) for kind in kinds):
            wanted = " or ".join(_WORDS.get(kind, "None") for kind in kinds)
            raise UserError(f"{name} must be {wanted}, not {value!r}")


@functools.cache
def _fields(settings: type) -> dict[str, tuple[type, ...]]:
    return {name: _kinds(hint) for name, hint in typing.get_type_hints(settings).items()}


def _kinds(hint: Any) -> tuple[type, ...]:
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(hint) or hint for hint in hints)


def _is_a(kind: type, value: Any) -> bool:
    if kind is bool or not isinstance(value, bool):
        return isinstance(value, (int, float) if kind is float else kind)
    return False
