"""What passes for text in a row of data."""

from typing import Any


def is_text(value: Any) -> bool:
    r"""Return whether a JSON value is a string that UTF-8 can hold.

    Example: "a\ud83d", an emoji that was cut in half, is not.
    """
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
