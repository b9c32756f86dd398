"""Messages of a conversation, and how they become what a chat template expects.

Templates are written for `transformers`, and for what vLLM makes of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from jinja2 import nodes

from cluster.core.bounds import MAX_JSON_DEPTH
from cluster.core.json_text import find_half, is_deeper_than

_ALPHANUMERIC = re.compile(r"[a-zA-Z0-9]{9}")
_NUMBERED = re.compile(r"functions\..+:\d+")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call of a tool by the assistant."""

    id: str
    name: str
    arguments: str
    """A JSON object, or other text where the model wrote no object."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    """What the assistant thought before the content."""
    parts: tuple[str, ...] = ()
    """The texts that `content` joins, where the client sent several."""

    @property
    def chars(self) -> int:
        """Number of characters of content, reasoning and calls."""
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.reasoning or "") + calls


@dataclass(frozen=True, slots=True)
class Expected:
    """What a chat template expects of messages, as its code shows."""

    call_ids: str = ""
    """Ids of calls; see `CallFormat.history_ids`."""
    knows_developer: bool = True
    """Whether it has a role `developer`."""
    reads_parts: bool = False
    """Whether it reads contents as lists of parts."""
    reads_texts: bool = True
    """Whether it reads contents as texts."""
    knows_none: bool = False
    """Whether it asks if a content is none, as that of a message is that has calls alone."""
    shows_arguments: bool = False
    """Whether it shows arguments of calls as they are, and so expects their text, not an object."""

    @classmethod
    def of(cls, source: str, tree: nodes.Template, call_ids: str) -> Expected:
        """Return what a template with this source and syntax tree expects."""
        names = set(_aliases(tree))
        reads_parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
        tests = (test for test in tree.find_all(nodes.Test) if test.name == "string")
        reads_texts = not reads_parts or any(_is_content(test.node, names) for test in tests)
        nones = (test for test in tree.find_all(nodes.Test) if test.name == "none")
        knows_none = any(_is_content(test.node, names) for test in nones)
        return cls(call_ids, "developer" in source, reads_parts, reads_texts, knows_none, _shows_arguments(tree))

    def variables(self, message: Message, arguments: Callable[[CalledTool], object]) -> dict[str, Any]:
        """Return a message as the template reads it. `arguments` returns those of a call."""
        content: object = message.content
        if self.knows_none and message.tool_calls and not message.content:
            content = None
        elif self.reads_parts and (message.parts or not self.reads_texts):
            content = [{"type": "text", "text": text} for text in message.parts or (message.content,)]
        found: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            found["name"] = message.name
        if message.tool_call_id is not None:
            found["tool_call_id"] = message.tool_call_id
        if message.reasoning is not None:
            found["reasoning_content"] = found["reasoning"] = found["thinking"] = message.reasoning
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if self.shows_arguments else arguments(call),
                    },
                }
                for call in message.tool_calls
            ]
        return found

    def prepared(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages with roles and ids of calls that the template knows."""
        if not self.knows_developer:
            messages = _without_developer(messages)
        return tuple(_with_ids(messages, self.call_ids) if self.call_ids else messages)


def _aliases(tree: nodes.Template) -> Iterator[str]:
    """Yield the names to which a template assigns the content of a message."""
    for one in tree.find_all(nodes.Assign):
        if isinstance(one.target, nodes.Name) and _is_content(one.node, ()):
            yield one.target.name
    for macro in tree.find_all(nodes.Macro):
        for argument in macro.args:
            if "content" in argument.name:
                yield argument.name


def _is_content(node: nodes.Node | None, names: Sequence[str] | set[str]) -> bool:
    """Whether an expression is the content of a message, or a part of it that a filter takes."""
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    return _is_field(node, "content", names)


def _shows_arguments(tree: nodes.Template) -> bool:
    """Whether a template writes arguments of calls as they are, and never reads them as an object."""
    assigned = (one for one in tree.find_all(nodes.Assign) if _is_field(one.node, "arguments", ()))
    names = {one.target.name for one in assigned if isinstance(one.target, nodes.Name)}

    def is_part_of(*kinds: type[nodes.Node]) -> bool:
        return any(
            _is_field(part, "arguments", names) for one in tree.find_all(kinds) for part in one.iter_child_nodes()
        )

    reads = (nodes.Filter, nodes.Test, nodes.For, nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Call)
    return is_part_of(nodes.Output, nodes.Add, nodes.Concat) and not is_part_of(*reads)


def _is_field(node: nodes.Node | None, field: str, names: Sequence[str] | set[str]) -> bool:
    """Whether an expression is this field of an object, or one of the variables that stand for it."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == field
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == field
    return False


def _without_developer(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose developer is the system. One that follows a message of the system continues it."""
    found: list[Message] = []
    for message in messages:
        if message.role != "developer":
            found.append(message)
        elif found and found[-1].role == "system":
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n\n{message.content}", parts=())
        else:
            found.append(replace(message, role="system"))
    return found


def _with_ids(messages: Sequence[Message], form: str) -> Iterator[Message]:
    """Yield messages whose calls have ids of a form. A result names its call, or belongs to the first one without."""
    ids: dict[str, str] = {}
    pending: list[str] = []
    number = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            own = _id(call, number, form)
            number += 1
            ids[call.id] = own
            pending.append(own)
            calls.append(replace(call, id=own))
        own_id = message.tool_call_id
        if message.role == "tool":
            own_id = ids.get(own_id or "", own_id) or (pending[0] if pending else None)
            if own_id in pending:
                pending.remove(own_id)
        yield replace(message, tool_calls=tuple(calls), tool_call_id=own_id)


def _id(call: CalledTool, number: int, form: str) -> str:
    if form != "alphanumeric":
        is_right = _NUMBERED.fullmatch(call.id) is not None
        return call.id if is_right else form.replace("NUMBER", str(number)).replace("NAME", call.name)
    if _ALPHANUMERIC.fullmatch(call.id):
        return call.id
    value = int.from_bytes(blake2b(f"{number}/{call.id}".encode(errors="surrogatepass"), digest_size=8).digest())
    return "".join(_DIGITS[value // len(_DIGITS) ** place % len(_DIGITS)] for place in range(9))


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[str], *, in_system: bool = True) -> list[Message]:
    """Return a conversation that offers tools, and shows their calls, in its texts, for a template that knows none.

    The offer stands in the message of the system, or in front of the first message of the user.
    """
    offer = "\n".join(
        (
            "You can call these functions:",
            "<tools>",
            *tools,
            "</tools>",
            "To call one, write its name and arguments as JSON between tags:",
            '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>',
        )
    )
    turns = [_with_calls_as_text(message) for message in messages]
    if turns[0].role == "system" and in_system:
        return [Message("system", f"{turns[0].content}\n\n{offer}", turns[0].name), *turns[1:]]
    if in_system:
        return [Message("system", offer), *turns]
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), 0)
    turns[first] = replace(turns[first], content=f"{offer}\n\n{turns[first].content}", parts=())
    return turns


def with_results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which the user says the results of tools, for a template that knows no such role.

    Results, and what the user says after them, are one message, since many such templates take turns alone.
    """
    found: list[Message] = []
    is_after_result = False
    for message in map(_with_calls_as_text, messages):
        is_result = message.role == "tool"
        if is_result:
            message = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        if is_after_result and message.role == "user":
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n{message.content}")
        else:
            found.append(message)
        is_after_result = is_result
    return found


def _with_calls_as_text(message: Message) -> Message:
    calls = [
        f'<tool_call>{{"name": {to_json(call.name)}, "arguments": {call.arguments}}}</tool_call>'
        for call in message.tool_calls
    ]
    return Message(message.role, "\n".join([*filter(None, [message.content]), *calls]), message.name)


def _called_with(call: CalledTool) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; `None` if what the model wrote is none, or nested too deep."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    is_shown = isinstance(value, dict) and not is_deeper_than(value, MAX_JSON_DEPTH) and find_half(value) is None
    return value if is_shown else None


def has_broken_call(message: Message) -> bool:
    """Whether the arguments of a call are no JSON object."""
    return any(_called_with(call) is None for call in message.tool_calls)


def as_text(call: CalledTool) -> object:
    """Return the arguments of a call as an object, or as the text that the model wrote instead."""
    found = _called_with(call)
    return call.arguments if found is None else found


def as_object(call: CalledTool) -> object:
    """Return the arguments of a call as an object, which has the text that the model wrote instead of one."""
    found = _called_with(call)
    return {"partial_json": call.arguments} if found is None else found


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as `transformers` writes it in templates: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
