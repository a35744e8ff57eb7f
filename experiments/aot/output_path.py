"""The file that `--program` names."""

import os
from pathlib import Path

from clover_jax.errors import UserError


def place_for(path: str | os.PathLike, flag: str) -> Path:
    """Return the path of a file that will be written after long work.

    Raises UserError, naming the flag, where no file can be written.
    """
    # Checked before the work, since afterwards the result would be lost.
    place = Path(path).expanduser()
    if place.is_dir() or not place.parent.is_dir():
        raise UserError(f"{flag}={path} must be a file in a folder that exists")
    return place
