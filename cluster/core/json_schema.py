"""The keywords of JSON Schema that say nothing about the form of a value, which the library of grammars would refuse.

JSON Schema 2020-12 makes `format` an annotation: a validator ignores those that it does not know.
https://json-schema.org/draft/2020-12/json-schema-validation#name-vocabularies-for-semantic-c
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The formats that answers are held to."""
HARMLESS_FORMATS = frozenset({"binary", "directory-path", "double", "file-path", "float", "password", "path"})
"""Formats of OpenAPI and pydantic that every value of their type has."""
STRICT_FORMAT = f"one of the formats {', '.join(sorted(FORMATS))} where strict is true"
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Keywords with the values that allow everything."""
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by names of the client's own."""


def without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without unknown formats and without keywords that allow everything, at every level."""
    schema = copy.deepcopy(schema)
    for part in _schemas(schema):
        if _has_unknown_format(part):
            del part["format"]
        for name, values in _NEUTRAL.items():
            if name in part and any(type(part[name]) is type(value) and part[name] == value for value in values):
                del part[name]
    return schema


def unknown_format(schema: object) -> str | None:
    """Return the first format in a schema that answers might miss; `None` if there is none."""
    found = (str(part["format"]) for part in _schemas(schema) if _has_unknown_format(part))
    return next((name for name in found if name not in HARMLESS_FORMATS), None)


def _has_unknown_format(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] not in FORMATS


def _schemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas inside of it, also those in places that only references name."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            yield part
            for name, entry in part.items():
                if name in _NAMED and isinstance(entry, dict):
                    pending.extend(entry.values())
                elif name not in _VALUES:
                    pending.append(entry)
