"""The texts that `pilotfish translate` reads: lines of a text file, or one field of JSONL."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.core.errors import InvalidRequest
from cluster.core.json_text import WHOLE, has_half


def read_sources(path: Path, field: str | None) -> tuple[str, ...]:
    """Return one text per line of a file, in order. With `field`, each line is a JSON object that has it.

    Raises `InvalidRequest`, which names the file and the line.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("FILE", str(path), f"a readable file in UTF-8 ({error})") from None
    lines = content.removesuffix("\n").replace("\r\n", "\n").split("\n") if content else []
    if field is None:
        return tuple(lines)
    return tuple(_field(line, f"{path}, line {number}", field) for number, line in enumerate(lines, 1))


def _field(line: str, where: str, field: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest(where, line[:80], "a JSON object with --field") from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        names = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise InvalidRequest(where, names, f"a JSON object with a text under {field!r}")
    if has_half(text):
        raise InvalidRequest(where, text, WHOLE)
    return text
