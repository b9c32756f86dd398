"""What an answer is constrained to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """How a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object. The text is empty."""
    JSON_SCHEMA = "json_schema"
    """JSON that a schema, given as JSON text, describes."""
    REGEX = "regex"
    """Text that a regular expression matches from its beginning to its end."""
    CHOICE = "choice"
    """One of several texts, which are given as a JSON array."""
    GRAMMAR = "grammar"
    """A context-free grammar in Lark's syntax, or in the EBNF of GBNF files."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match."""

    kind: GrammarKind
    text: str = ""

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar of one of several texts."""
        return cls(GrammarKind.CHOICE, json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def of_schema(cls, schema: object) -> Grammar:
        """Return the grammar of a JSON schema."""
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of a choice."""
        return tuple(json.loads(self.text))
