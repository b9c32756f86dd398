"""Sentences with a reference translation, from lines of JSON with one field per language."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sentence:
    """A sentence and its translation by a person."""

    source: str
    reference: str


def read_sentences(file: Path, pair: str, first: int, count: int | None) -> list[Sentence]:
    """Read `count` lines from line `first` on, or all. `pair` names both fields, as in `fr-en`. Raises `ValueError`."""
    source, _, goal = pair.partition("-")
    lines = file.read_text("utf-8").splitlines()[first:][:count]
    if len(lines) < (count or 1):
        raise ValueError(f"{file}: needed {count or 1} lines from line {first} on, found {len(lines)}")
    return [Sentence(values[source], values[goal]) for values in map(json.loads, lines)]
