"""The keywords of JSON Schema that say nothing about the form of a value, which the library of grammars would refuse.

JSON Schema 2020-12 makes `format` an annotation: a validator ignores those that it does not know.
https://json-schema.org/draft/2020-12/json-schema-validation#name-vocabularies-for-semantic-c
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

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
_DESCRIPTIONS = ("title", "description", "$comment")
"""Keywords whose texts are for people. Those of many tools are longer than the rest of their schemas."""
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
"""A place in a list, as references name it. Python converts no number of thousands of digits."""
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by names of the client's own."""


def without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without descriptions, unknown formats and keywords that allow everything, at every level."""
    schema = copy.deepcopy(schema)
    for part in schemas_in(schema):
        for name in _DESCRIPTIONS:
            if isinstance(part.get(name), str):
                del part[name]
        if isinstance(part.get("deprecated"), bool):
            del part["deprecated"]
        if _has_unknown_format(part):
            del part["format"]
        for name, values in _NEUTRAL.items():
            if name in part and any(type(part[name]) is type(value) and part[name] == value for value in values):
                del part[name]
    return schema


def unknown_format(schema: object) -> str | None:
    """Return the first format in a schema that answers might miss; `None` if there is none."""
    found = (str(part["format"]) for part in schemas_in(schema) if _has_unknown_format(part))
    return next((name for name in found if name not in HARMLESS_FORMATS), None)


_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_MOST_REFERENCES = 8
"""Most references and alternatives in each other that `types_of` follows."""
KnownTypes = dict[str, frozenset[str] | None]
"""The types that references into one schema name."""


def types_of(
    schema: object, root: Mapping[str, Any], known: KnownTypes | None = None, depth: int = 0
) -> frozenset[str] | None:
    """Return the JSON types that a schema names, directly, by its values, alternatives or a reference into `root`.

    Returns `None` if it names none, so that any type may be meant. `known` keeps what the references of `root` name:
    each is followed once, and one that leads back to itself names no type.
    """
    known = {} if known is None else known
    if not isinstance(schema, dict) or depth > _MOST_REFERENCES:
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(map(str, named))
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        return frozenset(_TYPES[type(value)] for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            found = [types_of(part, root, known, depth + 1) for part in schema[word]]
            if word == "allOf":
                return next((types for types in found if types is not None), None)
            return None if None in found else frozenset().union(*filter(None, found))
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    if reference not in known:
        known[reference] = None
        known[reference] = types_of(place_of(root, reference)[0], root, known, depth + 1)
    return known[reference]


def _has_unknown_format(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] not in FORMATS


def place_of(root: object, reference: str) -> tuple[object, bool]:
    """Return what a reference to a place in a schema (`#` or `#/…`) names, and whether the place exists."""
    found = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None, False
    return found, True


def schemas_in(schema: object) -> Iterator[dict[str, Any]]:
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
