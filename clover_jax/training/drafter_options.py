"""--drafter_options: what one kind of drafter can be told and others cannot."""

from __future__ import annotations

from typing import Any

from clover_jax.drafters import registry
from clover_jax.errors import UserError

_BOOLS = {"true": True, "false": False}


def parse_drafter_options(text: str, kind: str) -> dict[str, Any]:
    """Return the options that "name=value,..." sets, each of the type that the kind declares.

    Example: "order=block_first,output_projector=false" for clover2 gives
    {"order": "block_first", "output_projector": False}.
    Raises UserError that lists the kind's options where one is unknown or has a bad value.
    """
    known = registry.plain_options(kind)
    listed = ", ".join(f"{name}={hint.__name__.upper()}" for name, hint in known.items())
    options: dict[str, Any] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, value = item.partition("=")
        problem = None
        if not equals:
            problem = f"{item!r} is not written name=value"
        elif name not in known:
            problem = f"a {kind} head has no option {name!r}"
        elif name in options:
            problem = f"{name} is given twice"
        if problem is None:
            try:
                options[name] = _BOOLS[value.lower()] if known[name] is bool else known[name](value)
            except (KeyError, ValueError):
                wanted = "true or false" if known[name] is bool else known[name].__name__
                problem = f"{name} must be {wanted}, not {value!r}"
        if problem is not None:
            raise UserError(f"--drafter_options={text}: {problem}; the options are {listed}")
    return options
