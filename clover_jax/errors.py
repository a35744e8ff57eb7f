"""What a user can get wrong, told apart from what a programmer can get wrong."""


class UserError(ValueError):
    """Report a mistake in what the user gave: a flag, a file, a checkpoint, a config.

    The message is one line that says what was wrong, with the actual values, and what would be
    right. A command turns it into that line on stderr and status 2 (`clover_jax.cli.run`). Every
    other ValueError, ours or JAX's, is a bug and keeps its traceback.
    """
