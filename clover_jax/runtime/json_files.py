"""Reading JSON files that a user names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises UserError when the file is missing, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
