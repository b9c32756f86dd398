"""JSON values of clients and models. JSON can hold half of a surrogate pair, which UTF-8 and protobuf cannot."""

from __future__ import annotations

import re

_HALF = re.compile("[\ud800-\udfff]")
WHOLE = "valid Unicode, without half of a surrogate pair"
"""The bound that texts keep."""


def has_half(text: str) -> bool:
    """Whether a text has half of a surrogate pair."""
    return not text.isascii() and _HALF.search(text) is not None


def find_half(value: object, field: str = "") -> tuple[str, object] | None:
    """Return the first text inside of a JSON value that has half of a surrogate pair, with its field.

    The name of an entry belongs to its object.
    """
    if isinstance(value, str):
        return (field, value) if has_half(value) else None
    if isinstance(value, dict):
        for name, entry in value.items():
            if has_half(name):
                return field or name, name
            if (found := find_half(entry, f"{field}.{name}" if field else name)) is not None:
                return found
    elif isinstance(value, list):
        for position, entry in enumerate(value):
            if (found := find_half(entry, f"{field}[{position}]")) is not None:
                return found
    return None
