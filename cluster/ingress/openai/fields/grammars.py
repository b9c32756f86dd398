"""The parameters that constrain an answer: OpenAI's `response_format`, and those of vLLM, older ones included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.core import bounds
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.json_schema import STRICT_FORMAT, unknown_format
from cluster.ingress.openai.fields.types import StrictModel, Text, Texts, Untyped

_KINDS = {"json": GrammarKind.JSON_SCHEMA, "regex": GrammarKind.REGEX, "grammar": GrammarKind.GRAMMAR}
_NAMES = ("json", "regex", "choice", "grammar", "json_object")
"""Parts of `structured_outputs` that constrain an answer."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    "disable_fallback": (True, False),
    "whitespace_pattern": (),
    "structural_tag": (),
}
"""The other parts of `structured_outputs`, with the values that are accepted."""


class GrammarParameters(StrictModel):
    """Parameters of both endpoints that say what an answer matches. At most one of them may do so."""

    response_format: Untyped | None = None
    """`text`, `json_object` (also with a `schema`), or `json_schema` with a schema, which every answer matches whether
    or not `strict` is set. Formats that are not known are annotations; `strict` refuses those that answers might miss.
    JSON is written on one line, as `json.dumps` does. No effect on an answer that must be a call of a tool."""
    structured_outputs: Untyped | None = None
    """What the answer matches: `json` (a schema), `regex`, `choice`, `grammar` (Lark's syntax or EBNF) or
    `json_object`."""
    guided_json: dict[str, Any] | Text | None = None
    """The older name of `structured_outputs.json`."""
    guided_regex: Text | None = None
    """The older name of `structured_outputs.regex`."""
    guided_choice: Texts | None = None
    """The older name of `structured_outputs.choice`."""
    guided_grammar: Text | None = None
    """The older name of `structured_outputs.grammar`."""

    def requested_grammar(self) -> tuple[str, Grammar] | None:
        """Return the parameter that constrains the answer, and its grammar; `None` without one.

        Raises `InvalidRequest` for wrong values, and for several such parameters.
        """
        found: list[tuple[str, Grammar]] = []
        for name in ("response_format", "structured_outputs"):
            value = getattr(self, name)
            if value is not None:
                grammar = _FORMS[name](name, value)
                found.extend([] if grammar is None else [grammar])
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                found.append((f"guided_{kind}", _grammar(f"guided_{kind}", kind, value)))
        if len(found) > 1:
            raise InvalidRequest(found[1][0], getattr(self, found[1][0].split(".")[0]), f"left out with {found[0][0]}")
        return found[0] if found else None


def _response_format(name: str, value: dict[str, Any]) -> tuple[str, Grammar] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is None:
            return name, Grammar(GrammarKind.JSON_OBJECT)
        return f"{name}.schema", _grammar(f"{name}.schema", "json", value["schema"])
    if kind != "json_schema":
        raise UnsupportedParameter(f"{name}.type", kind, "text, json_object or json_schema")
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidRequest(f"{name}.json_schema", described, "an object with a schema")
    field = f"{name}.json_schema.schema"
    schema = described.get("schema")
    if described.get("strict") is True and (found := unknown_format(schema)) is not None:
        raise InvalidRequest(field, found, STRICT_FORMAT)
    return field, _grammar(field, "json", schema)


def _structured_outputs(name: str, value: dict[str, Any]) -> tuple[str, Grammar] | None:
    present = {part: given for part, given in value.items() if given is not None}
    for part, accepted in _NEUTRAL.items():
        if part in present and present[part] not in accepted:
            raise UnsupportedParameter(f"{name}.{part}", present[part], "left out")
    wanted = [part for part in _NAMES if part in present and present[part] is not False]
    if len(wanted) != 1:
        raise InvalidRequest(name, value, f"an object with one of {', '.join(_NAMES)}")
    field = f"{name}.{wanted[0]}"
    return field, _grammar(field, wanted[0], present[wanted[0]])


_FORMS = {"response_format": _response_format, "structured_outputs": _structured_outputs}


def _grammar(field: str, kind: str, value: object) -> Grammar:
    """Return the grammar of one part of `structured_outputs`. Raises `InvalidRequest`."""
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest(field, value, "true")
        return Grammar(GrammarKind.JSON_OBJECT)
    if kind == "choice":
        if not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise InvalidRequest(field, value, "a list of strings")
        bounds.count(field, value, 1, bounds.MAX_CHOICES, "strings")
        return Grammar.of_choices(value)
    if kind == "json" and isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "a JSON schema: a JSON object" if kind == "json" else "a string")
    return Grammar(_KINDS[kind], value)
