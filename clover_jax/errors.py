"""A user's mistake as an exception of its own, apart from bugs."""


class UserError(ValueError):
    """Report a mistake in what the user gave: a flag, a file, a checkpoint, a config.

    The message is one line that says what was wrong, with the actual values, and what would be
    right. A command turns it into that line on stderr and status 2 (`cli.run`). Every other
    ValueError, ours or JAX's, is a bug and keeps its traceback.
    """


def reason_of(error: BaseException) -> str:
    """Return the first line of what an exception says, its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
