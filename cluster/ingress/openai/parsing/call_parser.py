"""Finds calls of tools in the text of an answer that arrives in parts.

Arguments are passed on while they arrive. What looks like a call and is none stays content. The result does not depend
on how the text is split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.answer_format import ToolFormat
from cluster.core.json_text import find_half, without_halves
from cluster.ingress.openai.parsing.json_span import JsonSpan
from cluster.ingress.openai.parsing.parts import Part, PartKind, undecided

_MAX_HEAD_CHARS = 1024
"""Longest beginning of a call, up to its arguments, that is recognised before the whole call is there."""
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_OPENINGS = {ToolFormat.HERMES: "<tool_call>", ToolFormat.MISTRAL: "[TOOL_CALLS]", ToolFormat.LLAMA: "<|python_tag|>"}
_CLOSING = "</tool_call>"
_SEPARATORS = " \t\r\n,;"
_BETWEEN = _SEPARATORS + "[]"


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of the parser: which tool calls of an answer it passes on, and when."""

    parallel: bool = True
    """Whether all calls are passed on, or the first one alone."""
    forced: bool = False
    """Whether the answer consists of calls, because the client requires one. Nothing of it is content."""
    whole: bool = False
    """Whether a call is passed on once its arguments are complete, because the client's stops may end the answer."""


ALL_CALLS = CallOptions()
"""All calls, while they arrive."""


class CallParser:
    """Separates the calls of tools from the content of one answer."""

    def __init__(self, form: ToolFormat, options: CallOptions = ALL_CALLS) -> None:
        self.calls = 0
        """Number of calls so far."""
        self._form = form
        self._options = options
        self._held: list[Part] = []
        """The parts of a call that is passed on when it is whole."""
        self._opening = _OPENINGS[form]
        self._buffer = ""
        """Text that is not passed on yet."""
        self._parts: list[Part] = []
        self._span = JsonSpan()
        self._depth = 0
        """Open brackets outside of the arguments of a call."""
        self._scanned = 0
        """How much of the buffer the span has read."""
        self._opened = ""
        """The opening marker of a section in which no call was found yet."""
        self._state: Callable[[], bool] = self._start if form is ToolFormat.LLAMA else self._content

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts that are certain."""
        self._buffer += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        return self._state == self._arguments

    def flush(self, *, stopped: bool = False) -> list[Part]:
        """Return what was held back, at the end of the answer.

        `stopped` says that a stop ended the answer, not its length. A call that is held back because it is not whole
        is then left out.
        """
        held, self._held = self._held, []
        is_certain = self._state in (self._arguments, self._end_of_call)
        is_dropped = self._state == self._between and not self._opened
        is_dropped = is_dropped or self._options.forced or (stopped and self._options.whole and self._begins_call())
        rest = "" if is_certain or is_dropped else self._opened + self._buffer
        self._buffer = self._opened = ""
        return [*([] if stopped else held), *([Part(PartKind.CONTENT, rest)] if rest else [])]

    def _begins_call(self) -> bool:
        """Whether a marker has announced a call whose name is not complete yet."""
        return self._form is not ToolFormat.LLAMA and self._state in (self._between, self._object)

    # Each state reads from the buffer. It returns whether the next state can read on.

    def _start(self) -> bool:
        """The beginning of an answer that may be a call as a whole."""
        text = self._buffer.lstrip()
        if not text:
            return False
        self._state = self._object if text[0] == "{" else self._content
        if text[0] == "{":
            self._opened, self._buffer = self._buffer[: -len(text)], text
        return True

    def _content(self) -> bool:
        before, found, after = self._buffer.partition(self._opening)
        if found:
            self._emit_content(before.rstrip())
            self._opened, self._buffer = before[len(before.rstrip()) :] + found, after
            self._state = self._between
            return True
        held = undecided(self._buffer, self._opening)
        certain = self._buffer[: len(self._buffer) - held].rstrip()  # white space before a call is left out
        self._emit_content(certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _between(self) -> bool:
        """Between calls: the next call, or the end of the section."""
        rest = self._buffer.lstrip(_SEPARATORS)
        if self._form is ToolFormat.MISTRAL and rest and self._opening.startswith(rest[: len(self._opening)]):
            if len(rest) < len(self._opening):
                return False
            self._buffer = rest[len(self._opening) :]
            return True
        rest = rest.lstrip(_BETWEEN)
        if not rest:
            if not self._opened:
                self._buffer = ""
            return False
        if rest[0] == "{":
            self._take_opening(rest)
            self._state = self._object
            return True
        if self._form is ToolFormat.HERMES:
            return self._close(rest)
        if self._form is ToolFormat.MISTRAL:
            return self._named(rest)
        return self._no_call()

    def _close(self, rest: str) -> bool:
        if rest.startswith(_CLOSING) and not self._opened:
            self._buffer, self._state = rest[len(_CLOSING) :].lstrip(), self._after_section
            return True
        if _CLOSING.startswith(rest) and not self._opened:
            return False
        return self._no_call()

    def _after_section(self) -> bool:
        """After a closed section, white space is left out."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._content
        return True

    def _named(self, rest: str) -> bool:
        """A name, then arguments."""
        match = _NAMED.match(rest[:_MAX_HEAD_CHARS])
        if match is None:
            is_open = len(rest) < _MAX_HEAD_CHARS and re.fullmatch(r"[\w.-]+(?:\[[\w\]-]*)*\s*", rest) is not None
            return False if is_open else self._no_call()
        self._take_opening(rest[match.end() :])
        self._begin_call(match[1])
        self._span, self._depth, self._state = JsonSpan(), 0, self._arguments
        return True

    def _object(self) -> bool:
        """A call as an object: its name and arguments, or all of it if they do not come first."""
        if self._scanned == 0:
            self._span = JsonSpan()
        match = _HEAD.match(self._buffer[:_MAX_HEAD_CHARS])
        if match is not None:
            self._span = JsonSpan()
            self._span.until(self._buffer[: match.end()], 0, 0)
            self._opened = ""
            self._begin_call(without_halves(json.loads(match[1], strict=False)))
            self._buffer, self._scanned, self._state, self._depth = self._buffer[match.end() :], 0, self._arguments, 1
            return True
        end = self._span.until(self._buffer, self._scanned, 0)
        if end is None:
            self._scanned = len(self._buffer)
            return False
        text, self._scanned = self._buffer[:end], 0
        call = _whole_call(text)
        if call is None:
            return self._no_call()
        self._opened, self._buffer = "", self._buffer[end:]
        self._begin_call(call[0])
        self._emit(Part(PartKind.ARGUMENTS, call[1]))
        self._release()
        self._state = self._between
        return True

    def _arguments(self) -> bool:
        end = self._span.until(self._buffer, 0, self._depth)
        text = self._buffer if end is None else self._buffer[:end]
        self._emit(Part(PartKind.ARGUMENTS, text))
        self._buffer = self._buffer[len(text) :]
        if end is None:
            return False
        self._release()
        self._state = self._end_of_call if self._depth else self._between
        return True

    def _end_of_call(self) -> bool:
        """What follows the arguments in the object of a call is left out."""
        end = self._span.until(self._buffer, 0, 0)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._state = self._between
        return True

    def _no_call(self) -> bool:
        """What looked like calls is content."""
        self._emit_content(self._opened)
        self._opened, self._scanned, self._state = "", 0, self._content
        return True

    def _take_opening(self, rest: str) -> None:
        """Continue at `rest`. What precedes it belongs to the opening until a call is found."""
        if self._opened:
            self._opened += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer, self._scanned = rest, 0

    def _begin_call(self, name: str) -> None:
        self.calls += 1
        self._opened = ""
        self._emit(Part(PartKind.CALL, name))

    def _emit(self, part: Part) -> None:
        """Pass on a part of a call. The name of a call may be empty."""
        if (part.text or part.kind is PartKind.CALL) and (self._options.parallel or self.calls <= 1):
            (self._held if self._options.whole else self._parts).append(part)

    def _release(self) -> None:
        """Pass on the call that has become whole."""
        self._parts += self._held
        self._held.clear()

    def _emit_content(self, text: str) -> None:
        if text and not self._options.forced:
            self._parts.append(Part(PartKind.CONTENT, text))


def _whole_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call, or `None` if the text is no call."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return without_halves(name), json.dumps(arguments, ensure_ascii=find_half(arguments) is not None)
