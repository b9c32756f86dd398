"""Whether a grammar can be matched by an answer that ends. A rule that always requires itself never does.

Rules are reduced to what each of their alternatives requires, and those that can end are found from the leaves up. The
grammar is one that the library has compiled, so its syntax is not checked. Nothing is claimed of what is not read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.core.json_schema import place_of

Rules = dict[str, list[list[str]]]
"""The alternatives of each rule, and the rules that each of them requires. An unknown rule can end."""

_DEFINITION = re.compile(r"[!?]?([A-Za-z_][A-Za-z0-9_]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:(?!:)")
_TOKEN = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|\#[^\n]*|%(?:ignore|import)\b[^\n]*|->\s*\w+)
    |(?P<value>%(?:json|regex|llguidance)\b)
    |(?P<leaf>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>)
    |(?P<count>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>\.\.|[][()|?*+&])""",
    re.VERBOSE,
)
_FIRST_COUNT = re.compile(r"^[{~]\s*(\d*)")
_JSON = json.JSONDecoder()
_LEAF, _NEVER = "a leaf", "no rule"
"""Two symbols that are no names of rules: one that always ends, and one that never does."""
_ROOT = "the root"
"""The rule of a whole schema."""


class _NotUnderstood(Exception):
    """The grammar uses what is not read here."""


def endless_rule(source: str) -> str:
    """Return why no answer that ends matches a grammar in Lark's syntax; empty if one does, or if that is unknown."""
    try:
        return _reason(_lark_rules(source), "start", "the rule start")
    except (_NotUnderstood, RecursionError):
        return ""


def endless_schema(schema: object) -> str:
    """Return why no finite value matches a JSON schema; empty if one does, or if that is unknown."""
    return _reason(_schema_rules(schema), _ROOT, "the schema")


def _reason(rules: Rules, start: str, name: str) -> str:
    return "" if start in _ending(rules) else f"{name} always requires itself again, so no answer that ends matches"


def _ending(rules: Rules) -> set[str]:
    """Return the rules that can end, in a time that is linear in the size of the rules."""
    used: dict[str, list[tuple[str, list[str]]]] = {}
    missing: dict[int, int] = {}
    found: list[str] = []
    for name, alternatives in rules.items():
        for required in alternatives:
            known = {other for other in required if other in rules}
            missing[id(required)] = len(known)
            for other in known:
                used.setdefault(other, []).append((name, required))
            if not known:
                found.append(name)
    ending: set[str] = set()
    while found:
        name = found.pop()
        if name in ending:
            continue
        ending.add(name)
        for user, required in used.get(name, ()):
            missing[id(required)] -= 1
            if not missing[id(required)]:
                found.append(user)
    return ending


# --- Lark's syntax --------------------------------------------------------------------------------


def _lark_rules(source: str) -> Rules:
    rules: Rules = {_NEVER: []}
    groups: list[list[list[str]]] = [[[]]]
    """The alternatives of the open groups. The outermost one is a rule."""
    for kind, text in _tokens(source):
        sequence = groups[-1][-1]
        if kind == "definition":
            rules[text] = [[]]
            groups = [rules[text]]
        elif kind in ("name", "leaf"):
            sequence.append(text)
        elif text in ("(", "["):
            groups.append([[]])
        elif text == "|":
            groups[-1].append([])
        elif text == ")":
            name = f"{len(rules)} group"
            rules[name] = groups.pop()
            groups[-1][-1].append(name)
        elif text == "]":
            groups.pop()
            groups[-1][-1].append(_LEAF)
        elif text in ("?", "*") or (kind == "count" and not _FIRST_COUNT.findall(text)[0].strip("0")):
            sequence[-1] = _LEAF
        elif kind != "count" and text not in ("+", "..", "&"):
            raise _NotUnderstood
    return rules


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of the tokens that matter here. Texts and other values of their own are leaves."""
    place = 0
    while place < len(source):
        if (begun := _DEFINITION.match(source, place)) is not None:
            yield "definition", begun[1]
            place = begun.end()
            continue
        found = _TOKEN.match(source, place)
        if found is None:
            raise _NotUnderstood
        kind, text, place = str(found.lastgroup), found[0], found.end()
        if kind == "value":
            try:
                value, place = _JSON.raw_decode(source, source.index("{", place))
            except ValueError:
                raise _NotUnderstood from None
            yield "leaf", _NEVER if text == "%json" and endless_schema(value) else _LEAF
        elif kind == "leaf":
            yield "leaf", _LEAF
        elif kind != "skipped":
            yield kind, text.lstrip("!?") if kind == "name" else text


# --- JSON schemas ---------------------------------------------------------------------------------


def _schema_rules(root: object) -> Rules:
    """Return the rules of a schema and those inside of it.

    Schemas are numbered. A path to each would take the memory of its keys as often as schemas are below them.
    """
    rules: Rules = {_NEVER: []}
    names: dict[int, str] = {}
    pending: list[tuple[str, dict[str, Any]]] = []

    def rule(schema: object) -> str:
        if not isinstance(schema, dict):
            return _NEVER if schema is False else _LEAF
        name = names.get(id(schema))  # `root` keeps all of them, so no two have one id
        if name is None:
            name = names[id(schema)] = f"schema {len(names)}"
            pending.append((name, schema))
        return name

    rules[_ROOT] = [[rule(root)]]
    while pending:
        name, schema = pending.pop()
        required: list[str] = []
        rules[name] = [required]
        if isinstance(reference := schema.get("$ref"), str):
            required.append(rule(_referenced(root, reference)))
        required += map(rule, _list(schema.get("allOf")))
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema.get(key)):
                rules[f"{name} {key}"] = [[rule(part)] for part in parts]
                required.append(f"{name} {key}")
        types = schema.get("type")
        types = [types] if isinstance(types, str) else _list(types)
        if types and set(map(str, types)) <= {"object", "array"} and not {"const", "enum"} & schema.keys():
            contents = {"object": _entries, "array": _items}
            rules[f"{name} type"] = [[rule(part) for part in contents[kind](schema)] for kind in types]
            required.append(f"{name} type")
            if "object" in types and (some := list(_choices(schema))):
                rules[f"{name} some"] = [[rule(part)] for part in some]
                rules[f"{name} type"][types.index("object")].append(f"{name} some")
    return rules


def _entries(schema: dict[str, Any]) -> Iterator[object]:
    """Yield the schema of each value that an object must have."""
    known = schema.get("properties")
    for key in _list(schema.get("required")):
        if isinstance(known, dict) and isinstance(key, str) and key in known:
            yield known[key]
        elif "patternProperties" not in schema:
            yield schema.get("additionalProperties", True)


def _choices(schema: dict[str, Any]) -> Iterator[object]:
    """Yield the schema of each value of an object that must have one and may choose which."""
    if not isinstance(schema.get("minProperties"), int) or schema["minProperties"] < 1 or schema.get("required"):
        return
    for key in ("properties", "patternProperties"):
        yield from schema[key].values() if isinstance(schema.get(key), dict) else ()
    yield schema.get("additionalProperties", True)


def _items(schema: dict[str, Any]) -> Iterator[object]:
    """Yield the schema of each value that an array must have."""
    least, first = schema.get("minItems"), _list(schema.get("prefixItems"))
    count = least if isinstance(least, int) else 0
    yield from first[:count]
    if count > len(first):
        yield schema.get("items", True)


def _referenced(root: object, reference: str) -> object:
    """Return the schema that a reference inside of the schema names; for any other, one that all values match."""
    if reference not in ("", "#") and not reference.startswith("#/"):
        return True
    found, is_there = place_of(root, reference)
    return found if is_there else True


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
