"""What an answer is constrained to, and its form for the library `llguidance` with the limits of its parser.

The process that decides tokens and the one that checks requests compile the same source with the same limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from cluster.core.bounds import MAX_CHOICES
from cluster.core.json_schema import without_annotations


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


_LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "max_items_in_row": 2000 + MAX_CHOICES,  # all texts of a choice are in one row, also where it follows reasoning
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_lexer_states": 10_000,
        "max_grammar_size": 100_000,
        "precompute_large_lexemes": False,
        "verbose_errors": False,
    }
)
_JSON_STYLE = MappingProxyType({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
"""JSON as `json.dumps` writes it. White space of any length would let a model write nothing else."""
_CONTROL = re.compile(r"[\x7f-\x9f]")
_SPECIAL_IN_REGEX = re.compile(r"(\\.)|/|\n", re.DOTALL)


def parser_limits() -> dict[str, Any]:
    """Return arguments of `llguidance.LLParserLimits`.

    They bound work and memory and do not depend on the machine's speed.
    """
    return dict(_LIMITS)


def source_of(grammar: Grammar) -> str:
    """Return a grammar in the form of the library. Raises `ValueError` for a schema that is no JSON object."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _with_schema({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return _with_schema(json.loads(grammar.text))
    return lark_source(grammar)


def lark_source(grammar: Grammar) -> str:
    """Return a grammar in the library's dialect of Lark's syntax; its rule `start` matches the answer.

    Raises `ValueError` for a schema that is no JSON object.
    """
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return f"start: {lark_json({'type': 'object'})}"
        case GrammarKind.JSON_SCHEMA:
            return f"start: {lark_json(json.loads(grammar.text))}"
        case GrammarKind.REGEX:
            return f"start: /{_SPECIAL_IN_REGEX.sub(_escaped, grammar.text)}/"
        case GrammarKind.CHOICE:
            return "start: " + " | ".join(lark_text(choice) for choice in grammar.choices)
        case GrammarKind.GRAMMAR:
            return grammar.text


def lark_text(text: str) -> str:
    """Return a text as a literal of Lark's syntax, whose lexer takes no control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def lark_json(schema: object) -> str:
    """Return JSON that a schema describes, as an expression of the library's dialect of Lark's syntax.

    Raises `ValueError` for a schema that is no JSON object.
    """
    return f"%json {json.dumps(_styled(schema))}"


def _with_schema(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": _styled(schema)}]})


def _styled(schema: object) -> dict[str, Any]:
    """The schema without annotations, and with the style of its JSON. A client's own options are replaced."""
    if isinstance(schema, dict):
        return {**without_annotations(schema), "x-guidance": dict(_JSON_STYLE)}
    if schema is True:
        return {"x-guidance": dict(_JSON_STYLE)}
    raise ValueError("a schema is a JSON object")


def _escaped(match: re.Match[str]) -> str:
    """Escape what would end or break a regular expression between slashes."""
    if match[1]:
        return "\\n" if match[1] == "\\\n" else match[1]
    return "\\/" if match[0] == "/" else "\\n"
