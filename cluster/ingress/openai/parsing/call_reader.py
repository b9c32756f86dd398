"""Reads calls of tools in one of the formats in which models write them.

Arguments are passed on while they arrive. What looks like a call and is none is not read: it stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cluster.core.answer_format import CallFormat, Field, Literal, Pattern, literal_of
from cluster.core.json_text import has_half
from cluster.ingress.openai.parsing import argument_values as values
from cluster.ingress.openai.parsing.argument_values import Parameters
from cluster.ingress.openai.parsing.parts import Part, PartKind
from cluster.ingress.openai.parsing.text_reader import Markers, Reading, TextReader, strict_json

_SEPARATORS = re.compile(r"[\s,;]*")
_WORD = re.compile(r"\w*")
_ID = re.compile(r"[\w.\-]*")
_IN_NAME = re.compile(r"[\w.\-]")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_MOST_REREAD = 1 << 18
"""Most characters of objects that are no calls, which are read again as text. Beyond it no more are tried."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The choice of the calls of an answer that reach the client, and of the moment when they do."""

    tools: Mapping[str, Parameters] = field(default_factory=dict)
    """The tools that were offered, and the schemas of their arguments. A call of any other name is text."""
    parallel: bool = True
    """Whether all calls are passed on, or the first one alone."""
    forced: bool = False
    """Whether the answer consists of calls, because the client requires one. Nothing of it is content."""
    whole: bool = False
    """Whether a call is passed on once its arguments are complete, because the client's stops may end the answer."""


@dataclass(slots=True)
class _Found:
    """What was read of a call as an object."""

    held: str | None
    """The arguments, which are passed on at the end of the object; `None` if there are none yet."""
    name: str = ""


class CallReader:
    """Reads the calls at one place of an answer after the other, and passes on their parts."""

    def __init__(
        self, reader: TextReader, form: CallFormat, options: CallOptions, take: Callable[[Part], None]
    ) -> None:
        self._reader = reader
        self._form = form
        self._options = options
        self._take = take
        self._names = sorted(options.tools, key=len, reverse=True)
        self._name_keys = (*_NAME_KEYS, *re.findall(r'"(\w+)": NAME', form.object))
        self._argument_keys = (*_ARGUMENT_KEYS, *re.findall(r'"(\w+)": ARGUMENTS', form.object))
        self._held: list[Part] = []
        """The parts of a call that is passed on when it is whole."""
        self.count = 0
        """Number of calls so far."""
        self.is_inside = False
        """Whether the arguments of a call are not complete."""
        self.is_cut = False
        """Whether the answer ends within the beginning of a call, after a marker that announces it."""
        self.is_stopped = False
        """Whether a stop has ended the answer, not its length."""
        self._is_announced = False
        """Whether a marker was read, while it is not certain that a call follows."""
        self._reread = 0
        """Number of characters of objects that were no calls."""

    @property
    def openings(self) -> Iterator[str]:
        """The texts with which calls may begin, at any place of an answer."""
        yield from filter(None, self._form.section[0].split()[:1])
        for pattern in self._form.patterns:
            for part in pattern:
                if isinstance(part, Field):
                    break
                yield literal_of(part).text.split()[0]
                if not literal_of(part).is_optional:
                    break

    def read(self, *, at_beginning: bool) -> Reading[bool]:
        """Read the calls that begin here, and return whether there are any. Nothing is read if there are none.

        Calls that no marker announces are read `at_beginning` of an answer alone, and after other calls.
        """
        reader, start = self._reader, self._reader.at
        self._is_announced = is_section = bool(self._form.section[0]) and (
            yield from reader.literal(self._form.section[0])
        )
        if not (yield from self._call(is_bare=at_beginning or is_section)):
            reader.at = start
            self.is_cut = self._is_announced and reader.is_final
            return False
        while True:
            reader.cut()
            yield from reader.run(_SEPARATORS)
            if not (yield from self._call(is_bare=True)):
                reader.at = 0
                break
        if self._form.section[1]:
            yield from reader.literal(self._form.section[1])
        return True

    def rest(self, *, stopped: bool) -> list[Part]:
        """Return the parts of a call that the end of the answer cut; none if a stop has `stopped` the answer."""
        held, self._held = self._held, []
        return [] if stopped else held

    def _call(self, *, is_bare: bool) -> Reading[bool]:
        start = self._reader.at
        for pattern in self._form.patterns:
            if (yield from self._matches(pattern, is_bare=is_bare)):
                return True
            self._reader.at = start
        return False

    def _matches(self, pattern: Pattern, *, is_bare: bool) -> Reading[bool]:
        reader, count, name = self._reader, self.count, ""
        for part in pattern:
            if isinstance(part, str | Literal):
                literal = literal_of(part)
                if (yield from reader.literal(literal.text)):
                    is_bare = self._is_announced = True
                elif not literal.is_optional:
                    return self.count > count
            elif not is_bare:
                return False
            elif part is Field.NAME:
                found = yield from self._name()
                if found is None:
                    return False
                name = found
            elif part is Field.ID:
                yield from reader.run(_ID)
            elif not (yield from self._field(part, name)):
                return self.count > count
            elif self.is_inside:
                return True
        return self.count > count

    def _field(self, part: Field, name: str) -> Reading[bool]:
        match part:
            case Field.CALL | Field.LIST:
                return (yield from self._objects(is_bare=not self._is_announced))
            case Field.PYTHON:
                return (yield from self._python_calls())
            case Field.TAGS:
                self._begin(name)
                self._end(is_whole=(yield from self._tags(name)))
                return True
        if (yield from self._reader.ahead()) != "{":
            return False
        self._begin(name)
        read = self._braces() if part is Field.BRACES else self._reader.json_rest(0, self._argument)
        self._end(is_whole=(yield from read))
        return True

    def _name(self) -> Reading[str | None]:
        """Read the name of a tool; nothing and `None` if none is here."""
        reader = self._reader
        yield from reader.spaces()
        while True:
            rest = reader.text[reader.at : reader.at + len(self._names[0]) + 1] if self._names else ""
            if not reader.is_final and any(len(rest) <= len(name) and name.startswith(rest) for name in self._names):
                yield
                continue
            for name in self._names:
                follows = rest[len(name) :]
                if name and rest.startswith(name) and not (_IN_NAME.match(name[-1]) and _IN_NAME.match(follows)):
                    reader.at += len(name)
                    return name
            return None

    # Calls as JSON objects

    def _objects(self, *, is_bare: bool) -> Reading[bool]:
        reader, found = self._reader, False
        is_list = yield from reader.literal("[")
        while (yield from self._object(is_bare=is_bare)):
            found = True
            if self.is_inside:
                return True
            reader.cut()
            yield from reader.run(_SEPARATORS)
            if reader.text[reader.at : reader.at + 1] != "{":
                reader.at = 0
                break
        if is_list and found:
            yield from reader.literal("]")
        return found

    def _object(self, *, is_bare: bool) -> Reading[bool]:
        """Read an object with name and arguments, in any order. `is_bare`: without arguments it is no call."""
        reader, start = self._reader, self._reader.at
        if self._reread > _MOST_REREAD:
            return False
        is_call = yield from self._members(is_bare=is_bare)
        if not is_call:
            self._reread += reader.at - start
            reader.at = start
        return is_call

    def _members(self, *, is_bare: bool) -> Reading[bool]:
        reader, found, depth = self._reader, _Found(held=None if is_bare else "{}"), 1
        if not (yield from reader.literal("{")):
            return False
        while depth:
            yield from reader.run(_SEPARATORS)
            if (yield from reader.ahead()) == "}":
                reader.at += 1
                depth -= 1
                continue
            key = yield from self._key()
            if key is None:
                return False
            first = yield from reader.ahead()
            if self._form.object.startswith("{NAME"):
                found.name = key
            is_arguments = key in self._argument_keys or found.name == key
            if first == "{" and key == "function":
                reader.at += 1
                depth += 1
            elif first == "{" and is_arguments and found.name in self._options.tools:
                self._begin(found.name)
                self._end(is_whole=(yield from reader.json_rest(0, self._argument)))
                if not self.is_inside:
                    yield from reader.json_rest(depth)
                return True
            elif not (yield from self._member(key, found, is_arguments=is_arguments)):
                return False
        return self._take_whole(found)

    def _key(self) -> Reading[str | None]:
        key = _decoded((yield from self._reader.json_string()))
        return key if key is not None and (yield from self._reader.literal(":")) else None

    def _member(self, key: str, found: _Found, *, is_arguments: bool) -> Reading[bool]:
        """Read a value that is not passed on yet. Returns whether the object may still be a call."""
        value = yield from self._reader.json_value()
        if value is None:
            return False
        if key in self._name_keys and value.startswith('"'):
            found.name = _decoded(value) or ""
            return found.name in self._options.tools
        if is_arguments:
            found.held = value
        return True

    def _take_whole(self, found: _Found) -> bool:
        """Pass on a call whose arguments are text, come before the name, or are missing."""
        if found.held is None or found.name not in self._options.tools:
            return False
        arguments = found.held if found.held != "null" else "{}"
        if arguments.startswith('"'):
            arguments = _decoded(arguments) or "{}"
        try:
            arguments = strict_json(arguments)
            value = json.loads(arguments)
            if not isinstance(value, dict):
                return False
            if has_half(arguments):  # an escape within arguments that are given as text
                arguments = values.as_json(value)
        except (ValueError, RecursionError):
            return False
        self._begin(found.name)
        self._argument(arguments)
        self._end(is_whole=True)
        return True

    # Calls in other notations

    def _tags(self, name: str) -> Reading[bool]:
        """Read arguments between tags. Returns whether they are whole."""
        reader, tags, parameters = self._reader, self._form.tags, self._options.tools[name]
        if tags is None:
            raise TypeError(f"{self._form.name}: a format with tags describes them")
        keys = Markers(filter(None, (tags.key_end.strip(), tags.json_key_end.strip())))
        ends = Markers((tags.value_end.strip(), "\n" + tags.value_end.strip()))
        opening, held = "{", " \t\r\n" if tags.strips else ""
        while (yield from reader.literal(tags.key)):
            key: list[str] = []
            marker = yield from reader.until(keys, key.append)
            if marker is None:
                return False
            reader.at += len(marker)
            shown = values.as_json("".join(key))
            if tags.value and not (yield from reader.literal(tags.value)):
                return False
            if tags.strips:
                yield from reader.spaces()
            elif (yield from reader.character()) == "\n":
                reader.at += 1
            is_text = tags.json_key_end != "" and marker == tags.key_end.strip()
            if is_text or values.is_text(parameters, "".join(key)):
                self._argument(f'{opening}{shown}: "')
                end = yield from reader.until(ends, lambda part: self._argument(values.as_json(part)[1:-1]), held)
                if end is None:
                    return False
                self._argument('"')
            else:
                value: list[str] = []
                end = yield from reader.until(ends, value.append, held)
                if end is None:
                    return False
                converted = values.from_text("".join(value), parameters, "".join(key))
                self._argument(f"{opening}{shown}: {converted}")
            if tags.strips:
                yield from reader.spaces()
            reader.at += len(end.lstrip()) if tags.strips else len(end)
            opening = ", "
        rest = reader.text[reader.at :].strip()
        if reader.is_final and not self.is_stopped and (not rest or self._is_beginning(rest)):
            return False
        self._argument("}" if opening == ", " else "{}")
        return True

    def _is_beginning(self, text: str) -> bool:
        """Whether more text might have made of this one a tag, or the end of the call."""
        ends = (literal_of(part).text for part in self._form.call if not isinstance(part, Field))
        return any(one.strip().startswith(text) for one in (self._form.tags.key if self._form.tags else "", *ends))

    def _python_calls(self) -> Reading[bool]:
        reader, found = self._reader, False
        is_list = yield from reader.literal("[")
        while True:
            start = reader.at
            if found:
                yield from reader.run(_SEPARATORS)
            name = yield from self._name()
            if name is None or not (yield from reader.literal("(")):
                reader.at = start
                break
            found = True
            self._begin(name)
            self._end(is_whole=(yield from self._keywords(name)))
            if self.is_inside:
                return True
            reader.cut()
        if found and is_list:
            yield from reader.literal("]")
        return found

    def _keywords(self, name: str) -> Reading[bool]:
        """Read arguments as Python writes them, with keys or in the order of the schema."""
        reader, properties = self._reader, self._options.tools[name].get("properties")
        order = [*properties] if isinstance(properties, dict) else []
        no_words = sorted((key for key in order if _WORD.fullmatch(key) is None), key=len, reverse=True)
        opening, place = "{", 0
        while True:
            yield from reader.run(_SEPARATORS)
            first = yield from reader.ahead()
            if first in ("", ")"):
                reader.at += len(first)
                if first:
                    self._argument("}" if place else "{}")
                return bool(first)
            start = reader.at
            key = (yield from self._key_of(no_words)) or (yield from reader.run(_WORD))
            if not key or not (yield from reader.literal("=")):
                reader.at = start
                key = order[place] if place < len(order) else f"argument{place}"
            value = yield from reader.value(("'", '"'), ",)", has_escapes=True)
            if value is None:
                return False
            self._argument(f"{opening}{values.as_json(key)}: {values.from_python(value)}")
            reader.cut()
            opening, place = ", ", place + 1

    def _key_of(self, keys: list[str]) -> Reading[str]:
        """Read one of these keys in front of `=`, the longest first; nothing if none is here."""
        reader, starts = self._reader, [f"{key}=" for key in keys]
        while True:
            rests = [reader.text[reader.at : reader.at + len(start)] for start in starts]
            is_begun = any(rest != start and start.startswith(rest) for rest, start in zip(rests, starts, strict=True))
            if reader.is_final or not is_begun:
                break
            yield
        found = next((start for rest, start in zip(rests, starts, strict=True) if rest == start), "=")[:-1]
        reader.at += len(found)
        return found

    def _braces(self) -> Reading[bool]:
        """Read `{key:value,…}`."""
        reader, quote, opening = self._reader, self._form.quote, "{"
        colon = Markers(":")
        reader.at += 1
        while True:
            yield from reader.run(_SEPARATORS)
            first = yield from reader.ahead()
            if first in ("", "}"):
                reader.at += len(first)
                if first:
                    self._argument("}" if opening == ", " else "{}")
                return bool(first)
            key: list[str] = []
            if (yield from reader.until(colon, key.append)) is None:
                return False
            reader.at += 1
            value = yield from reader.value((quote, '"'), ",}", has_escapes=False)
            if value is None:
                return False
            shown = values.as_json(values.bare_key("".join(key), quote))
            self._argument(f"{opening}{shown}: {values.from_braces(value, quote)}")
            reader.cut()
            opening = ", "

    # What is passed on

    def _begin(self, name: str) -> None:
        self._reader.cut()
        self.count += 1
        self.is_inside = True
        self._emit(Part(PartKind.CALL, name))

    def _argument(self, text: str) -> None:
        self._emit(Part(PartKind.ARGUMENTS, text))

    def _end(self, *, is_whole: bool) -> None:
        self.is_inside = not is_whole
        if is_whole:
            for part in self._held:
                self._take(part)
            self._held.clear()

    def _emit(self, part: Part) -> None:
        if self._options.parallel or self.count <= 1:
            if self._options.whole:
                self._held.append(part)
            else:
                self._take(part)


def _decoded(text: str | None) -> str | None:
    """Return the text of a JSON string; `None` if it is none."""
    try:
        value = None if text is None else json.loads(strict_json(text))
    except ValueError:
        return None
    return value if isinstance(value, str) else None
