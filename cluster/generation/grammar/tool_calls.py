"""Grammars of answers that are calls of tools, in the form that the model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.core.answer_format import CallFormat, Field, Literal, literal_of
from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind, lark_json, lark_text
from cluster.core.json_schema import STRICT_FORMAT, KnownTypes, types_of, unknown_format
from cluster.generation.grammar.endless import endless_schema

ANY_TOOL = ""
"""Requires a call of any tool."""
Specials = Mapping[str, int]
"""The ids of special tokens by their text, which a grammar names by id."""
_MOST_CALLS = 8
"""Most calls in one answer."""
_MOST_DEPTH = 8
"""Objects and lists in each other whose schemas are kept in notations other than JSON; deeper ones hold any value."""
_MOST_ALTERNATIVES = 8
"""Alternatives of a value that are kept in notations other than JSON; more of them are any value."""
_MOST_CHARS = 1 << 20
"""Most characters of a grammar. A short schema with references can have a long one."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ROOT = "#/$defs/__root"
_ANY_TEXT = r"/(?s:.*)/"


def tool_call_grammar(
    tools: Sequence[str], required: str, form: CallFormat, specials: Specials, *, single: bool
) -> Grammar:
    """Return the grammar of calls of the `required` tool, or of `ANY_TOOL`.

    `tools` are JSON objects in OpenAI's form. `single` allows one call only, as a named tool does. Raises
    `InvalidRequest` for a tool that is not offered (`tool_choice`), or whose parameters are no schema (`tools`), and
    for schemas whose grammar is too long or too deep (`grammar`).
    """
    functions = functions_of(tools)
    chosen = [function for function in functions if required in (ANY_TOOL, function["name"])]
    if not chosen:
        raise InvalidRequest("tool_choice", required, "the name of one of the tools")
    most = 1 if single or required != ANY_TOOL else _MOST_CALLS
    try:
        text = _CallRules(form, specials).grammar(chosen, most)
    except RecursionError:
        raise InvalidRequest("grammar", "too many levels", "schemas with fewer levels") from None
    return Grammar(GrammarKind.GRAMMAR, text)


def functions_of(tools: Sequence[str]) -> list[dict[str, Any]]:
    """Return name and parameters of each tool. Raises `InvalidRequest` (`tools…`)."""
    return [_function(f"tools[{position}]", tool) for position, tool in enumerate(tools)]


def written(text: str, specials: Specials) -> str:
    """Return a text as literals of Lark's syntax, with its special tokens by their ids; empty for an empty text."""
    pieces = "|".join(re.escape(piece) for piece in sorted(specials, key=len, reverse=True) if piece)
    parts = re.split(f"({pieces})", text) if pieces else [text]
    return " ".join(f"<[{specials[part]}]>" if part in specials else lark_text(part) for part in parts if part)


def text_before(end: str, specials: Specials) -> tuple[str, str]:
    """Return the attribute and the body of a rule of any text and `end`, which does not occur before."""
    if any(piece in end for piece in specials):
        return "", f"{_ANY_TEXT} {written(end, specials)}"
    return f"[suffix={lark_text(end)}]", _ANY_TEXT


class _CallRules:
    """The rules of calls in one format."""

    def __init__(self, form: CallFormat, specials: Specials) -> None:
        self._form = form
        self._specials = specials
        self._lines: list[str] = []
        self._chars = 0
        """Number of characters of the rules so far."""
        self._has_any_value = False
        self._referred: dict[tuple[int, str, int], str] = {}
        """The rules of values that a reference names, by the schema that it is in, the reference, and the depth."""

    def grammar(self, functions: Sequence[dict[str, Any]], most: int) -> str:
        """Return the grammar of at most `most` calls of some functions."""
        form = self._form
        kinds = {Field.LIST: self._object, Field.PYTHON: self._python}
        listed = next((rule for kind, rule in kinds.items() if kind in form.call), None)
        if listed is not None:
            opening, between, closing = form.list
            entry = self._any_of([listed(function) for function in functions])
            entries = self._repeated(entry, between, most)
            calls = self._spaced(self._written(opening), entries, self._written(closing))
            call = self._spaced(*(self._part(part, calls) for part in form.call))
        elif form.between is None:
            call = self._any_of([self._call(function) for function in functions])
        else:
            call = self._repeated(self._any_of([self._call(function) for function in functions]), form.between, most)
        opening, closing = (self._written(text) for text in form.section)
        return "\n".join([f"start: {self._joined(opening, call, closing)}", *self._lines])

    def _call(self, function: dict[str, Any]) -> str:
        written: list[str] = []
        for before, part in zip(("", *self._form.call), self._form.call, strict=False):
            rule = self._part(part, self._fielded(part, function))
            is_tight = any(one in (Field.NAME, Field.ID) for one in (before, part)) and not (
                isinstance(before, Field) and isinstance(part, Field)
            )
            written += [rule] if is_tight or not written or not rule else [self._space, rule]
        return self._rule(self._joined(*written))

    def _part(self, part: str | Literal | Field, fields: str) -> str:
        """Return a part of a call: a literal, or the rule of its fields. Other fields are empty."""
        if isinstance(part, Field):
            return fields
        literal = literal_of(part)
        return self._written(literal.text.replace("*", "")) if literal.is_written else ""

    def _fielded(self, part: str | Literal | Field, function: dict[str, Any]) -> str:
        match part:
            case Field.NAME:
                return lark_text(function["name"])
            case Field.ID:
                return f"/{self._form.ids}/" if self._form.ids else ""
            case Field.ARGUMENTS:
                return self._rule(lark_json(function["parameters"]))
            case Field.CALL:
                return self._object(function)
            case Field.TAGS:
                return self._tags(function["parameters"])
            case Field.BRACES:
                return self._braces(function["parameters"], function["parameters"], 0)
        return ""

    def _object(self, function: dict[str, Any]) -> str:
        """Return the rule of a call as a JSON object."""
        fields = {
            "NAME": lark_text(json.dumps(function["name"], ensure_ascii=False)),
            "ID": f"/{self._form.ids}/",
            "ARGUMENTS": self._rule(lark_json(function["parameters"])),
        }
        parts = re.split(r"\b(NAME|ID|ARGUMENTS)\b", self._form.object)
        return self._rule(" ".join(fields.get(part) or lark_text(part) for part in parts if part))

    def _python(self, function: dict[str, Any]) -> str:
        """Return the rule of a call as Python writes it."""
        parameters = function["parameters"]
        known: KnownTypes = {}
        arguments = [
            (self._rule(f"{lark_text(key + '=')} {self._python_value(schema, parameters, known)}"), is_required)
            for key, schema, is_required in _properties(parameters)
        ]
        return self._rule(f'{lark_text(function["name"] + "(")} {self._sequence(arguments, ", ")} ")"')

    def _python_value(self, schema: object, parameters: dict[str, Any], known: KnownTypes) -> str:
        choices = _choices(_resolved(schema, parameters)) or []
        has_words = any(value is None or isinstance(value, bool) for value in choices)  # all else is written as in JSON
        if has_words and not any(isinstance(value, dict | list) for value in choices):
            return f"({' | '.join(lark_text(_as_python(value)) for value in choices)})"
        words = {"boolean": '("True" | "False")', "null": '"None"'}
        types = types_of(schema, parameters, known)
        if types is not None and len(types) == 1 and (word := words.get(min(types))) is not None:
            return word
        return self._json(schema, parameters)

    def _tags(self, parameters: dict[str, Any]) -> str:
        """Return the rule of arguments between tags."""
        tags = self._form.tags
        if tags is None:
            raise TypeError(f"{self._form.name}: a format with tags describes them")
        arguments = []
        known: KnownTypes = {}
        for key, schema, is_required in _properties(parameters):
            types = types_of(schema, parameters, known)
            is_text = types is None or "string" in types
            key_end = tags.key_end if is_text or not tags.json_key_end else tags.json_key_end
            before = self._joined(self._written(tags.key), lark_text(key), self._written(key_end + tags.value))
            choices = _choices(_resolved(schema, parameters))
            if choices is None and is_text:
                rule = self._joined(before, self._text(tags.value_end))
            else:
                value = (
                    f"({' | '.join(lark_text(_as_text(value)) for value in choices)})"
                    if choices is not None and is_text
                    else self._json(schema, parameters)
                )
                rule = self._spaced(before, value, self._written(tags.value_end))
            arguments.append((self._rule(self._joined(rule, self._space)), is_required))
        return self._sequence(arguments, "")

    def _braces(self, schema: object, root: dict[str, Any], depth: int) -> str:
        """Return the rule of a value whose texts stand between quotes, and whose keys need none."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return self._braces_of(schema, root, depth)
        key = (id(root), reference, depth)
        if key not in self._referred:  # a union that refers to itself is not written once for each place
            self._referred[key] = self._braces_of(_resolved(schema, root), root, depth)
        return self._referred[key]

    def _braces_of(self, schema: object, root: dict[str, Any], depth: int) -> str:
        if depth > _MOST_DEPTH or not isinstance(schema, dict):
            return self._any_braces()
        if depth == 0:
            schema = {**schema, "type": "object"}
        choices, quote = _choices(schema), self._written(self._form.quote)
        if choices is not None and not any(isinstance(value, dict | list) for value in choices):
            if not any(isinstance(value, str) for value in choices):
                return self._json(schema, root)
            around = [quote if isinstance(value, str) else "" for value in choices]
            values = [lark_text(_as_text(value)) for value in choices]
            return f"({' | '.join(map(self._joined, around, values, around))})"
        alternatives = _alternatives(schema)
        if alternatives:
            return self._any_of([self._braces(part, root, depth + 1) for part in alternatives])
        match schema.get("type"):
            case "string":
                return self._rule(f"{quote} {self._text(self._form.quote)}")
            case "array":
                entry = self._braces(schema.get("items"), root, depth + 1)
                return self._rule(f'"[" ({entry} ("," {entry})*)? "]"')
            case "object" if isinstance(schema.get("properties"), dict):
                entries = [
                    (self._rule(f"{lark_text(key + ':')} {self._braces(part, root, depth + 1)}"), is_required)
                    for key, part, is_required in _properties(schema)
                ]
                return self._rule(f'"{{" {self._sequence(entries, ",")} "}}"')
            case "object" if schema.get("additionalProperties") is False:
                return '"{" "}"'
            case "object":
                value = self._braces(schema.get("additionalProperties"), root, depth + 1)
                return self._rule(f'"{{" (/\\w+:/ {value} ("," /\\w+:/ {value})*)? "}}"')
            case "integer" | "number" | "boolean" | "null":
                return self._json(schema, root)
        return self._any_braces()

    def _any_braces(self) -> str:
        if not self._has_any_value:
            self._has_any_value = True
            quoted = f"{self._written(self._form.quote)} {self._text(self._form.quote)}"
            number = self._rule(lark_json({"type": ["number", "boolean", "null"]}))
            entries = '"[" (any_value ("," any_value)*)? "]"'
            members = '"{" (/\\w+:/ any_value ("," /\\w+:/ any_value)*)? "}"'
            self._lines.append(f"any_value: {quoted} | {number} | {entries} | {members}")
        return "any_value"

    # Parts of rules

    def _written(self, text: str) -> str:
        return written(text, self._specials)

    def _text(self, end: str) -> str:
        """Return the rule of any text and its end."""
        attribute, body = text_before(end, self._specials)
        return self._rule(body, attribute)

    def _json(self, schema: object, root: dict[str, Any]) -> str:
        """Return the rule of JSON that a part of a schema describes, with the references that the whole resolves."""
        has_references = '"$ref"' in json.dumps(schema)
        wrapped = {**_rooted(schema), "$defs": {"__root": _rooted(root)}} if has_references else schema
        return self._rule(lark_json(wrapped if isinstance(wrapped, dict) else True))

    def _rule(self, body: str, attribute: str = "") -> str:
        """Add a rule and return its name. Raises `InvalidRequest` (`grammar`) if the grammar is then too long."""
        self._chars += len(body)
        if self._chars > _MOST_CHARS:
            bound = f"schemas whose grammar has at most {_MOST_CHARS} characters"
            raise InvalidRequest("grammar", f"more than {_MOST_CHARS} characters", bound)
        name = f"rule{len(self._lines)}"
        self._lines.append(f"{name}{attribute}: {body}")
        return name

    def _any_of(self, rules: Sequence[str]) -> str:
        return rules[0] if len(rules) == 1 else self._rule(" | ".join(rules))

    def _repeated(self, rule: str, between: str, most: int) -> str:
        if most == 1:
            return rule
        return f"{rule} ({self._joined(self._space, self._spaced(self._written(between), rule))}){{0,{most - 1}}}"

    @property
    def _space(self) -> str:
        return f"/{self._form.spaces}/" if self._form.spaces else ""

    def _spaced(self, *parts: str) -> str:
        """Join parts with the white space that the format leaves free."""
        return (f" {self._space} " if self._space else " ").join(filter(None, parts))

    def _joined(self, *parts: str) -> str:
        return " ".join(filter(None, parts))

    def _sequence(self, parts: Sequence[tuple[str, bool]], between: str) -> str:
        """Return the rule of parts in their order, of which some are required, with a text between each two."""
        following, first = '""', '""'
        comma = lark_text(between) if between else ""
        for part, is_required in reversed(parts):
            alternatives = [] if is_required else [first]
            first = self._any_of([self._rule(f"{part} {following}"), *alternatives])
            alternatives = [] if is_required else [following]
            following = self._any_of([self._rule(f"{comma} {part} {following}"), *alternatives])
        return first


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, object, bool]]:
    """Return name, schema and necessity of each property."""
    properties, required = schema.get("properties"), schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return [(key, part, key in names) for key, part in properties.items()] if isinstance(properties, dict) else []


def _choices(schema: object) -> list[Any] | None:
    """Return the only values that a schema allows; `None` if it does not name them."""
    if not isinstance(schema, dict):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if not isinstance(values, list):
        return None
    named = schema.get("type")
    if isinstance(named, str | list):
        types = {named} if isinstance(named, str) else set(map(str, named))
        values = [value for value in values if _types(value) & types]
    return values or None


def _alternatives(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas of which a value matches one: one for each type, or those that are listed; none for others."""
    named = schema.get("type")
    if isinstance(named, list):
        return [{**schema, "type": name} for name in named]
    found = schema.get("anyOf", schema.get("oneOf"))
    return found if named is None and isinstance(found, list) and len(found) <= _MOST_ALTERNATIVES else []


def _types(value: object) -> frozenset[str]:
    """Return the JSON types of a value: a whole number has two."""
    types = types_of({"const": value}, {}) or frozenset()
    is_whole = "integer" in types or (isinstance(value, float) and value.is_integer())
    return types | {"number", "integer"} if is_whole else types


def _as_text(value: object) -> str:
    """Return a value as it is written where texts have no quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_python(value: object) -> str:
    """Return a value that is no object or list as Python writes it."""
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Return what a reference into the schema names, or the schema itself if it is none."""
    for _ in range(_MOST_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in filter(None, reference[1:].split("/")):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return None


def _rooted(schema: object) -> Any:
    """Return a schema whose references begin at `_ROOT` instead of at its root."""
    if isinstance(schema, list):
        return [_rooted(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _ROOT + part[1:] if key == "$ref" and isinstance(part, str) and part.startswith("#") else _rooted(part)
        for key, part in schema.items()
    }


def _function(field: str, tool: str) -> dict[str, Any]:
    function = json.loads(tool).get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise InvalidRequest(f"{field}.function.name", name, "a name")
    parameters = function.get("parameters") or _NO_PARAMETERS
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{field}.function.parameters", parameters, "a JSON schema: a JSON object")
    if function.get("strict") is True and (found := unknown_format(parameters)) is not None:
        raise InvalidRequest(f"{field}.function.parameters", found, STRICT_FORMAT)
    if reason := endless_schema(parameters):
        raise InvalidRequest(f"{field}.function.parameters", parameters, f"a JSON schema that ends: {reason}")
    named = parameters.get("type")
    if named is None or (isinstance(named, list) and "object" in named):
        parameters = {**parameters, "type": "object"}  # arguments are an object, whatever else the schema allows
    return {"name": name, "parameters": parameters}
