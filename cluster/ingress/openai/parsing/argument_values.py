"""Converts the values of arguments from the notations of models to JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.core.json_schema import types_of

Parameters = Mapping[str, Any]
"""The JSON schema of a tool's arguments."""
_TEXT = frozenset({"string"})
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_ESCAPE_OR_BREAK = re.compile(r"\\(?:\r\n|.)|[\r\n]", re.DOTALL)
_BREAKS = {"\n": "\\n", "\r": "\\r"}
_WORDS = {"True": True, "False": False, "None": None}


def parameter(parameters: Parameters, key: str) -> Any:
    """Return the schema of one argument; an empty one if there is none."""
    properties = parameters.get("properties")
    return properties.get(key, {}) if isinstance(properties, dict) else {}


def as_json(value: object) -> str:
    """Return a value as JSON text. Raises `ValueError` or `TypeError` for what is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


def is_text(parameters: Parameters, key: str) -> bool:
    """Whether the schema allows nothing but text for an argument."""
    return types_of(parameter(parameters, key), parameters) == _TEXT


def from_text(text: str, parameters: Parameters, key: str) -> str:
    """Return the value of an argument that is written as its JSON, or as the text itself, as the schema allows it."""
    schema = parameter(parameters, key)
    types = types_of(schema, parameters)
    bare = text.strip()
    if types != _TEXT:
        try:
            value = _WORDS[bare] if bare in _WORDS else json.loads(bare, parse_constant=_refuse)
            if not _is_meant_as_text(text, value, schema, types):
                return as_json(value) if bare in _WORDS else bare
        except (ValueError, RecursionError):
            pass
    return as_json(text)


def _is_meant_as_text(text: str, value: object, schema: Any, types: frozenset[str] | None) -> bool:
    """Whether a schema allows a text that can be read as JSON, and not the value that it then is."""
    named = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(named, list) and text in named:
        return not any(type(one) is type(value) and one == value for one in named)
    if types is None or "string" not in types:
        return False
    own = types_of({"const": value}, {}) or frozenset()
    if "integer" in own or (isinstance(value, float) and value.is_integer()):
        own |= {"integer", "number"}
    return not own & types


def from_python(text: str) -> str:
    """Return a value that is written as JSON, or as in Python, which reads some escapes of JSON in another way.

    In both, a text may have line breaks that are not escaped.
    """
    bare = text.strip()
    for read in (_from_json, ast.literal_eval, _with_line_breaks):
        try:
            return as_json(read(bare))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return as_json(bare)


def _from_json(text: str) -> object:
    return json.loads(text, strict=False)


def _with_line_breaks(text: str) -> object:
    return ast.literal_eval(_QUOTED.sub(_escaped, text))


def _escaped(quoted: re.Match[str]) -> str:
    """Return a text in quotes with its line breaks escaped, but for those that a backslash removes."""
    return _ESCAPE_OR_BREAK.sub(lambda found: _BREAKS.get(found[0], found[0]), quoted[0])


def from_braces(text: str, quote: str) -> str:
    """Return a value whose texts stand between `quote`, and whose keys need none."""
    try:
        value, rest = _braces_value(text, quote)
        return as_json(text.strip() if rest.strip() else value)
    except (ValueError, RecursionError):
        return as_json(text.strip())


def _braces_value(text: str, quote: str) -> tuple[object, str]:
    """Return the first value of a text, and what follows it. Raises `ValueError`."""
    text = text.lstrip()
    for mark in (quote, '"'):
        if text.startswith(mark):
            found, _, rest = text[len(mark) :].partition(mark)
            return found, rest
    if text.startswith(("{", "[")):
        return _braces_list(text, quote)
    end = next((place for place, character in enumerate(text) if character in ",]}"), len(text))
    bare = text[:end].strip()
    if bare in _WORDS:
        return _WORDS[bare], text[end:]
    try:
        return json.loads(bare, parse_constant=_refuse), text[end:]
    except ValueError:
        return bare, text[end:]


def _braces_list(text: str, quote: str) -> tuple[object, str]:
    is_object, rest = text[0] == "{", text[1:]
    found: dict[str, object] = {}
    entries: list[object] = []
    while True:
        rest = rest.lstrip(" \t\r\n,")
        if not rest:
            raise ValueError("a bracket is not closed")
        if rest[0] in "}]":
            return found if is_object else entries, rest[1:]
        if is_object:
            key, colon, rest = rest.partition(":")
            if not colon:
                raise ValueError("a key without a value")
            found[bare_key(key, quote)], rest = _braces_value(rest, quote)
        else:
            entry, rest = _braces_value(rest, quote)
            entries.append(entry)


def bare_key(text: str, quote: str) -> str:
    """Return a key without quotes around it."""
    text = text.strip()
    for mark in filter(None, (quote, '"')):
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            return text[len(mark) : -len(mark)]
    return text


def _refuse(name: str) -> object:
    raise ValueError(name)
