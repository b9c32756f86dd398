"""JSON values of clients and models.

JSON can hold half of a surrogate pair, which UTF-8 and protobuf cannot. Python reads numbers that JSON cannot hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

_HALF = re.compile("[\ud800-\udfff]")
WHOLE = "valid Unicode, without half of a surrogate pair"
"""The bound that texts keep."""
_MOST_FIELD_CHARS = 256
"""Most characters of a field that is reported."""


def has_half(text: str) -> bool:
    """Whether a text has half of a surrogate pair."""
    return not text.isascii() and _HALF.search(text) is not None


def find_half(value: object, field: str = "") -> tuple[str, object] | None:
    """Return the first text inside of a JSON value that has half of a surrogate pair, with its field.

    The name of an entry belongs to its object. The value may be nested to any depth. A long field is cut.
    """
    return _first(value, field, lambda entry: isinstance(entry, str) and has_half(entry))


def find_infinite(value: object) -> tuple[str, object] | None:
    """Return the first number inside of a JSON value that is not finite, with its field, as `find_half` does."""
    return _first(value, "", lambda entry: isinstance(entry, float) and not math.isfinite(entry))


def _first(value: object, field: str, is_found: Callable[[object], bool]) -> tuple[str, object] | None:
    pending: list[Iterator[tuple[str, object]]] = [iter([(field, value)])]
    while pending:
        for name, entry in pending[-1]:
            if is_found(entry):
                return name, entry
            if isinstance(entry, dict | list):
                pending.append(_entries(name[:_MOST_FIELD_CHARS], entry))
                break
        else:
            pending.pop()
    return None


def _entries(field: str, value: dict[str, object] | list[object]) -> Iterator[tuple[str, object]]:
    """Yield the names and entries of an object, or the entries of a list, each with its field."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield field or name, name
            yield f"{field}.{name}" if field else name, entry
    else:
        for position, entry in enumerate(value):
            yield f"{field}[{position}]", entry


def is_deeper_than(value: object, levels: int) -> bool:
    """Whether arrays and objects are nested more than `levels` deep. Later code may recurse into the value."""
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        containers = [
            entry
            for container in containers
            for entry in (container.values() if isinstance(container, dict) else container)
            if isinstance(entry, dict | list)
        ]
        if not containers:
            return False
    return True
