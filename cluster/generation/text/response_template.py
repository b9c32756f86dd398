"""The formats of calls and of reasoning that a checkpoint describes in the `response_template` of its tokenizer.

The specification is that of `transformers` (`transformers.utils.chat_parsing`). Its regular expressions are never run:
those that say no more than which texts surround which parts become such texts, and any other is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.core.answer_format import OWN_FORMAT, CallFormat, Field, Literal, Pattern, ReasoningFormat, Tags
from cluster.core.errors import InvalidRequest
from cluster.wire.codec.answer_format import (
    decode_call_format,
    decode_reasoning_format,
    encode_call_format,
    encode_reasoning_format,
)

_MOST_FIELDS = 8
_MOST_PATTERN_CHARS = 1024
_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIELDS = frozenset({*_REASONING, "content", "tool_calls"})
_SPACES = "[ \\n]{0,8}"
"""White space that a grammar allows where a template does not say which one its model writes."""
_CLASS = r"(?:\\[wSd]|\.|\[(?:\\.|[^\]\\])+\])"
_TOKEN = re.compile(
    rf"""
    (?P<space> (?: \\[snrt] | [ \n\t] ) [*+?]\?? | \\s )
  | (?P<control> \\[nrt] )
  | \(\?P<(?P<group>\w+)> (?: {_CLASS} [*+]\?? )+ \)
  | \(\?: (?P<choices> (?: \\. | [^()\\] )* ) \) (?P<optional> \?? )
  | (?P<wild> (?: \. | \[\^(?:\\.|[^\]\\])+\] ) [*+]\?? )
  | (?P<end> \$ | \\Z )
  | (?P<start> \^ )
  | (?: \\(?P<escaped>\W) | (?P<plain>[^\\.^$*+?{{}}()\[\]|]) ) (?![*+?{{])
    """,
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_RESERVED = frozenset({"NAME", "ARGUMENTS", "ID"})


class Inexpressible(Exception):
    """A template, or a part of it, that no row of a format describes. Its text names the part and the reason."""


@dataclass(frozen=True, slots=True)
class OwnFormats:
    """The rows that a checkpoint's `response_template` describes; `None` for what it does not have."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None


NONE_OWN = OwnFormats()
"""The checkpoint describes nothing."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A part of a pattern that differs from text to text, and its name."""

    name: str


_Part = str | Literal | _Group


def own_formats(template: object) -> OwnFormats:
    """Return the rows of a `response_template`. Raises `Inexpressible`."""
    if not isinstance(template, dict) or template.get("version", 1) != 1:
        raise Inexpressible("response_template: needed an object of version 1")
    _known("response_template", template, _KEYS)
    fields = template.get("fields")
    if not isinstance(fields, dict) or not 1 <= len(fields) <= _MOST_FIELDS:
        raise Inexpressible(f"response_template.fields: needed between 1 and {_MOST_FIELDS} fields")
    for name, field in fields.items():
        if name not in _FIELDS or not isinstance(field, dict):
            raise Inexpressible(f"field {name!r}: needed an object with the name {', '.join(sorted(_FIELDS))}")
    try:
        return OwnFormats(_calls(fields.get("tool_calls")), _reasoning(template, fields))
    except InvalidRequest as error:  # beyond the bounds of what is sent to those who read answers
        raise Inexpressible(str(error)) from None


# Reasoning and content


def _reasoning(template: Mapping[str, Any], fields: Mapping[str, Any]) -> ReasoningFormat | None:
    names = [name for name in _REASONING if name in fields]
    if len(names) > 1:
        raise Inexpressible(f"fields {', '.join(names)}: needed one of them")
    form = _thought(names[0], fields[names[0]]) if names else ReasoningFormat(OWN_FORMAT)
    content = fields.get("content", {})
    _known("field 'content'", content, {"open", "open_pattern", "close", "close_pattern", *_PLAIN})
    _plain_text("content", content)
    openings, closings = (_markers("content", content, key) for key in ("open", "close"))
    begun = _anchors(template) if openings else []  # what begins a message stands between two fields
    form = replace(form, markers_left_out=(*openings, *closings, *begun))
    if not form.reasons and not openings and not closings:
        return None
    read = decode_reasoning_format(encode_reasoning_format(form))
    return replace(read, begins_inside=form.begins_inside)


_PLAIN = frozenset({"content", "content_args", "repeats", "join", "optional"})


def _thought(name: str, field: Mapping[str, Any]) -> ReasoningFormat:
    _known(f"field {name!r}", field, {"open", "open_pattern", "close", "close_pattern", *_PLAIN})
    _plain_text(name, field)
    openings, closings = (_markers(name, field, key) for key in ("open", "close"))
    begins = "" in openings
    openings = [opening for opening in openings if opening]
    if len(openings) != 1 or len(closings) != 1 or "*" in closings[0]:
        raise Inexpressible(f"field {name!r}: needed one text before and one after it")
    return ReasoningFormat(OWN_FORMAT, openings[0], closings[0], begins_inside=begins, repeats=True)


def _plain_text(name: str, field: Mapping[str, Any]) -> None:
    if field.get("content", "text") != "text":
        raise Inexpressible(f"field {name!r}: its content {field['content']!r} is no text")


def _anchors(template: Mapping[str, Any]) -> list[str]:
    return [text for text in _listed(template.get("start_anchor", [])) if isinstance(text, str) and text.split()]


def _markers(name: str, field: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts of which one opens or closes a field; an empty text stands for the beginning of the answer."""
    found = []
    for parts in _alternatives(name, field, key):
        if any(not isinstance(part, str) for part in parts):
            raise Inexpressible(f"field {name!r}: its {key}_pattern has parts that differ or may be missing")
        found.append(" ".join(part for part in parts if isinstance(part, str)))
    return found


# Calls of tools


def _calls(field: Mapping[str, Any] | None) -> CallFormat | None:
    if field is None:
        return None
    where = "field 'tool_calls'"
    _known(where, field, {"open", "open_pattern", "close", "close_pattern", "transform", "transform_each", *_PLAIN})
    opening = _only("tool_calls", field, "open")
    closings = _alternatives("tool_calls", field, "close")
    form = _body(field, [part.name for part in opening if isinstance(part, _Group)])
    named = dict(zip(_captured(field), (Field.NAME, Field.ID), strict=False))
    before = tuple(named.get(part.name) if isinstance(part, _Group) else part for part in opening)
    if None in before:
        raise Inexpressible(f"{where}: its open_pattern captures what its transform does not name")
    first, *others = closings or [[]]
    if any(not isinstance(part, str | Literal) for closing in closings for part in closing):
        raise Inexpressible(f"{where}: its close_pattern captures a part")
    after = (*(_closing(part, is_written=True) for part in first), *(_closing(part) for way in others for part in way))
    pattern: Pattern = (*(part for part in before if part is not None), *form.call, *after)
    form = replace(form, call=pattern, between="" if field.get("repeats") else None, spaces=_SPACES)
    decode_call_format(encode_call_format(form))
    return form


def _closing(part: _Part, *, is_written: bool = False) -> Literal:
    text = part.text if isinstance(part, Literal) else str(part)
    return Literal(text, is_optional=True, is_written=is_written and isinstance(part, str))


def _captured(field: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the captures that are the name of the tool and the id of the call; an empty text for none."""
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    name = _placeholder(function.get("name"))[0] if isinstance(function, dict) else ""
    return (name, _placeholder(transform.get("id"))[0]) if isinstance(transform, dict) else ("", "")


def _body(field: Mapping[str, Any], captures: Sequence[str]) -> CallFormat:
    """Return the row of what stands between the opening and the closing of a call, from the shape of `transform`."""
    where, kind = "field 'tool_calls'", field.get("content", "text")
    arguments = field.get("content_args", {})
    transform, each = field.get("transform"), bool(field.get("transform_each"))
    function = transform.get("function") if isinstance(transform, dict) else None
    if kind not in ("json", "xml-inline") or not isinstance(arguments, dict) or not isinstance(transform, dict):
        raise Inexpressible(f"{where}: needed a content of json or xml-inline, and a transform to a function")
    _known(f"{where}: transform", transform, {"type", "function", "id"})
    if kind == "json" and function == "{content}" and not each and not arguments:
        return CallFormat(OWN_FORMAT, (Field.CALL,))
    if not isinstance(function, dict) or set(function) != {"name", "arguments"}:
        raise Inexpressible(f"{where}: its transform makes no function with name and arguments")
    name, value = (_placeholder(function[key]) for key in ("name", "arguments"))
    if name[0] in captures and value == ("content", ""):
        return _arguments(str(kind), arguments)
    keys = (name[0], value[0]) if each else (name[1], value[1])
    is_object = kind == "json" and not arguments and all(keys) and not _RESERVED.intersection(keys)
    if not is_object or (not each and {name[0], value[0]} != {"content"}):
        raise Inexpressible(f"{where}: its transform takes name and arguments from places that no format has")
    shape = f'{{"{keys[0]}": NAME, "{keys[1]}": ARGUMENTS}}'
    return CallFormat(OWN_FORMAT, (Field.LIST if each else Field.CALL,), object=shape, list=("[", ",", "]"))


def _arguments(kind: str, given: Mapping[str, Any]) -> CallFormat:
    where = f"field 'tool_calls': content_args of {kind}"
    if kind == "xml-inline":
        _known(where, given, {"tag_pattern", "value_parser"})
        parser = given.get("value_parser", {"name": "text"})
        if not isinstance(parser, dict) or parser.get("name", "text") not in ("text", "json"):
            raise Inexpressible(f"{where}: a value_parser other than text and json")
        return CallFormat(OWN_FORMAT, (Field.TAGS,), tags=_tags(where, given.get("tag_pattern")))
    _known(where, given, {"unquoted_keys", "string_delims", "allow_non_json"})
    delimiters = given.get("string_delims", [])
    if not delimiters and not given.get("unquoted_keys"):
        return CallFormat(OWN_FORMAT, (Field.ARGUMENTS,))
    match delimiters:
        case [[str(opening), str(closing)]] if opening == closing and given.get("unquoted_keys"):
            return CallFormat(OWN_FORMAT, (Field.BRACES,), quote=opening)
    raise Inexpressible(f"{where}: needed keys without quotes, and texts between two equal delimiters")


def _tags(where: str, pattern: object) -> Tags:
    """Return the tags of a pattern with the groups key and value."""
    parts = _parts(where, pattern)
    places = [place for place, part in enumerate(parts) if isinstance(part, _Group)]
    if [parts[place] for place in places] != [_Group("key"), _Group("value")]:
        raise Inexpressible(f"{where}: needed a tag_pattern with a key and then a value")
    key, value = places
    before, between, after = parts[:key], parts[key + 1 : value], parts[value + 1 :]
    if not (len(before) == len(after) == 1 and 1 <= len(between) <= 2):
        raise Inexpressible(f"{where}: needed texts before the key, between key and value, and after the value")
    if any(not isinstance(part, str) or "*" in part for part in (*before, *between, *after)):
        raise Inexpressible(f"{where}: its tags differ from text to text")
    first, second = (*between, "")[:2]
    return Tags(str(before[0]), str(first), str(second), str(after[0]), strips=True)


def _placeholder(text: object) -> tuple[str, str]:
    """Return what a `{placeholder.key}` names, and its key; empty texts for any other value."""
    found = _PLACEHOLDER.fullmatch(text) if isinstance(text, str) else None
    return ("", "") if found is None else (found[1], found[2] or "")


# Texts and patterns


def _only(name: str, field: Mapping[str, Any], key: str) -> list[_Part]:
    ways = _alternatives(name, field, key)
    if len(ways) != 1 or not ways[0]:
        raise Inexpressible(f"field {name!r}: needed one text or pattern {key!r}")
    return ways[0]


def _alternatives(name: str, field: Mapping[str, Any], key: str) -> list[list[_Part]]:
    """Return the ways in which a field opens or closes; none if it does not say."""
    where = f"field {name!r}: {key}"
    if key in field:
        texts = _listed(field[key])
        if not all(isinstance(text, str) and text.split() and "*" not in text for text in texts):
            raise Inexpressible(f"{where}: needed a text with other characters than white space, and without *")
        return [[text] for text in texts]
    if f"{key}_pattern" not in field:
        return []
    return _ways(f"{where}_pattern", field[f"{key}_pattern"])


def _ways(where: str, pattern: object) -> list[list[_Part]]:
    """Return the parts of each alternative of a pattern that has one choice and nothing else, or no choice."""
    whole = re.fullmatch(r"(?:\\s\*|\\n\?)?\(\?:((?:\\.|[^()\\])*)\)", pattern) if isinstance(pattern, str) else None
    ways = re.split(r"(?<!\\)\|", whole[1] if whole is not None else str(pattern))
    if len(ways) == 1 or (whole is None and "(" in str(pattern)):
        return [_parts(where, pattern)]
    return [_parts(where, way) if way not in ("^", "$", "\\Z") else [""] for way in ways if way not in ("$", "\\Z")]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _parts(where: str, pattern: object) -> list[_Part]:
    """Return a regular expression as texts and groups. White space that is no part of a text is left out."""
    if not isinstance(pattern, str) or len(pattern) > _MOST_PATTERN_CHARS:
        raise Inexpressible(f"{where}: needed a text of at most {_MOST_PATTERN_CHARS} characters")
    parts: list[_Part] = []
    text, place = "", 0
    for found in _tokens(pattern):
        kind = str(found.lastgroup)
        if kind in ("escaped", "plain", "control"):
            text += _without_star(where, _CONTROLS.get(found[0]) or found["escaped"] or found["plain"])
        elif kind == "wild" and (parts or text) and "*" not in text:
            text += "*"
        elif kind in ("wild", "start") or (text.endswith("*") and kind != "space"):
            break
        else:
            parts += [text] if text.split() and text != "*" else []
            text = "*" if text == "*" else ""
            parts += [_Group(found["group"])] if kind == "group" else []
            parts += (
                [_choice(where, found["choices"], is_optional=bool(found["optional"]))] if kind == "optional" else []
            )
        place = found.end()
    if place == len(pattern) and not text.endswith("*"):
        return [*parts, *([text] if text.split() else [])]
    raise Inexpressible(f"{where}: {pattern[place:]!r} in {pattern!r} is more than texts around parts")


def _tokens(pattern: str) -> Iterator[re.Match[str]]:
    place = 0
    while (found := _TOKEN.match(pattern, place)) is not None:
        place = found.end()
        yield found


def _choice(where: str, body: str, *, is_optional: bool) -> Literal | str:
    """Return a group that does not capture as one text."""
    parts = _parts(where, body) if "|" not in body.replace("\\|", "") else []
    if len(parts) != 1 or not isinstance(parts[0], str):
        raise Inexpressible(f"{where}: the group (?:{body}) is more than one text")
    return Literal(parts[0], is_optional=True, is_written=False) if is_optional else parts[0]


def _without_star(where: str, character: str) -> str:
    if character == "*":
        raise Inexpressible(f"{where}: a * in its text")
    return character


def _known(where: str, value: Mapping[str, Any], keys: frozenset[str] | set[str]) -> None:
    if unknown := sorted(map(str, set(value) - keys)):
        raise Inexpressible(f"{where}: unknown keys {', '.join(unknown)}")
