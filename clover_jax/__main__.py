"""List the commands, or run one: `python -m clover_jax COMMAND [--flag=value ...]`."""

import importlib
import sys
from collections.abc import Sequence

from clover_jax import __version__, cli

COMMANDS = ("train", "generate", "evaluate", "convert", "prepare", "bench", "serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names and return its status.

    Without one, list the commands. Status 2 with one line on stderr for an unknown command.
    """
    given = sys.argv[1:] if argv is None else argv
    name, *rest = given or ["--help"]
    if name in COMMANDS:
        command = importlib.import_module(f"clover_jax.{name}")
        return cli.run(command.main, command.define_flags, rest)
    if name == "--version":
        print(f"clover-jax {__version__}")
        return cli.STATUS_OK
    if name in cli.HELP:
        lines = ["usage: clover-jax COMMAND [--flag=value ...]", "", "commands:"]
        # Importing them all is quick: JAX is imported in their `main` only.
        for name in COMMANDS:
            described = importlib.import_module(f"clover_jax.{name}").__doc__ or ""
            lines.append(f"  {name:<10}{described.splitlines()[0]}")
        print("\n".join([*lines, "", "clover-jax COMMAND --help lists the flags of a command."]))
        return cli.STATUS_OK
    known = ", ".join(COMMANDS)
    print(f"clover-jax: {name!r} is not a command; use one of {known}", file=sys.stderr)
    return cli.STATUS_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
