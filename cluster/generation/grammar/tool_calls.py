"""Grammars of answers that are calls of tools, in the form that the model writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.core.answer_format import ToolFormat
from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind, lark_json, lark_text
from cluster.core.json_schema import STRICT_FORMAT, unknown_format
from cluster.generation.grammar.endless import endless_schema

ANY_TOOL = ""
"""Requires a call of any tool."""
MISTRAL_OPENING = "[TOOL_CALLS]"
"""What precedes calls in the form `MISTRAL`. For most tokenizers it is a special token."""
_MOST_CALLS = 8
"""Most calls in one answer."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_call_grammar(tools: Sequence[str], required: str, form: ToolFormat, *, single: bool) -> Grammar:
    """Return the grammar of calls of the `required` tool, or of `ANY_TOOL`.

    `tools` are JSON objects in OpenAI's form. `single` allows one call only, as a named tool does. Raises
    `InvalidRequest` for a tool that is not offered (`tool_choice`), or whose parameters are no schema (`tools`).
    """
    functions = functions_of(tools)
    chosen = [function for function in functions if required in (ANY_TOOL, function["name"])]
    if not chosen:
        raise InvalidRequest("tool_choice", required, "the name of one of the tools")
    rules = [_call(f"call{number}", function, form) for number, function in enumerate(chosen)]
    calls = " | ".join(f"call{number}" for number in range(len(chosen)))
    most = 1 if single or required != ANY_TOOL else _MOST_CALLS
    lines = [_start(form, most), f"call: {calls}", *(line for rule in rules for line in rule)]
    return Grammar(GrammarKind.GRAMMAR, "\n".join(lines))


def functions_of(tools: Sequence[str]) -> list[dict[str, Any]]:
    """Return name and parameters of each tool. Raises `InvalidRequest` (`tools…`)."""
    return [_function(f"tools[{position}]", tool) for position, tool in enumerate(tools)]


def with_special_opening(grammar: Grammar, token: int) -> Grammar:
    """Return a grammar of calls in the form `MISTRAL` whose opening is a special token."""
    opening = f"start: {lark_text(MISTRAL_OPENING)}"
    return Grammar(grammar.kind, grammar.text.replace(opening, f"start: <[{token}]>", 1))


def _start(form: ToolFormat, most: int) -> str:
    match form:
        case ToolFormat.HERMES:
            return f'start: call ("\\n" call){{0,{most - 1}}}' if most > 1 else "start: call"
        case ToolFormat.LLAMA:
            return "start: call"
        case ToolFormat.MISTRAL:
            more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
            return f'start: {lark_text(MISTRAL_OPENING)} "[" call{more} "]"'


def _call(rule: str, function: dict[str, Any], form: ToolFormat) -> list[str]:
    """The rule of one tool's calls, and that of its arguments: a schema with a root of its own, for its references."""
    field = "parameters" if form is ToolFormat.LLAMA else "arguments"
    opening, closing = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{field}": ', "}"
    if form is ToolFormat.HERMES:
        opening, closing = f"<tool_call>\n{opening}", f"{closing}\n</tool_call>"
    arguments = lark_json(function["parameters"])
    return [f"{rule}: {lark_text(opening)} {rule}_arguments {lark_text(closing)}", f"{rule}_arguments: {arguments}"]


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
    return {"name": name, "parameters": parameters}
