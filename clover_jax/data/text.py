"""What passes for text in a row of data."""

from typing import Any


def is_text(value: Any) -> bool:
    r"""Return whether a JSON value is a string that UTF-8 can hold.

    Example: "a\ud83d", an emoji that was cut in half, is not.
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
