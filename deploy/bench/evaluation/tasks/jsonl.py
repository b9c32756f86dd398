"""Reads the lines of data files. Errors name the file, the line and the field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError, shorten
from cluster.core.json_text import WHOLE, find_half, has_half


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a JSONL file."""

    where: str
    """The option, the file and the line, for errors."""
    values: Mapping[str, Any]

    def text(self, key: str) -> str:
        """A field that must be a text with other characters than spaces. Raises `ConfigurationError`."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ConfigurationError(f"{self.where}: {key}: needed a text that is not empty, found {shorten(value)}")
        if has_half(value):
            raise ConfigurationError(f"{self.where}: {key}: needed {WHOLE}, found {shorten(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A field that must be a list of texts. Raises `ConfigurationError`."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ConfigurationError(f"{self.where}: {key}: needed a list of texts, found {shorten(value)}")
        if half := find_half(value, key):
            raise ConfigurationError(f"{self.where}: {half[0]}: needed {WHOLE}, found {shorten(half[1])}")
        return tuple(value)


def read_rows(option: str, file: Path, most: int | None = None) -> list[Row]:
    """The first `most` lines of a file that `option` names. Raises `ConfigurationError`, also for an empty file."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines() splits at more, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{option} {file}: needed a readable JSONL file; {error}") from None
    rows: list[Row] = []
    for row in _parse(option, file, lines):
        rows.append(row)
        if most is not None and len(rows) >= most:
            break
    if not rows:
        raise ConfigurationError(f"{option} {file}: needed at least one line, found none")
    return rows


def _parse(option: str, file: Path, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{option} {file}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{where}: needed JSON; {error}") from None
        if not isinstance(values, dict):
            raise ConfigurationError(f"{where}: needed an object, found {shorten(values)}")
        yield Row(where, values)
