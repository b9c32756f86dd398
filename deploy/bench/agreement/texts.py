"""Reads the texts on which two models are compared: alone, or with the sources that they were written for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.tasks.jsonl import read_rows
from workers.distill.prompts import read_prompts


@dataclass(frozen=True, slots=True)
class Pair:
    """A text, and for an encoder-decoder model its source."""

    text: str
    source: str = ""

    @property
    def prompt(self) -> str:
        """What a model is asked."""
        return self.source or self.text


def read_pairs(file: Path, fields: str, most: int) -> list[Pair]:
    """The first `most` sources and texts of a JSONL file. `fields` is `SOURCE,TEXT`, two fields of its lines.

    Raises `ConfigurationError`.
    """
    names = [name.strip() for name in fields.split(",")]
    if len(names) != 2 or not all(names):
        raise ConfigurationError(f"--fields: {fields!r} is refused; it must be two names with a comma between: fr,en")
    source, text = names
    return [Pair(row.text(text), row.text(source)) for row in read_rows("FILE", file, most)]


def read_texts(file: Path) -> Iterator[str]:
    """The texts of a JSONL file (the field `text`, or the first message of each prompt), or the lines of another file.

    Raises `ConfigurationError`.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: needed a readable file of texts; {error}") from None
    if not lines:
        raise ConfigurationError(f"{file}: needed at least one line, found none")
    if file.suffix != ".jsonl":
        yield from lines
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            break
        yield row["text"]
    else:
        return
    yield from (prompt.turns[0] for prompt in read_prompts(file) if prompt.turns)
