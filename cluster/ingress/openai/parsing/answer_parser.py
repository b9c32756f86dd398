"""Separates an answer into reasoning, content and calls of tools, whole or while it is streamed."""

from __future__ import annotations

import re
from functools import partial

from cluster.core.answer_format import AnswerFormat, ReasoningFormat
from cluster.ingress.openai.parsing.call_reader import CallOptions, CallReader
from cluster.ingress.openai.parsing.parts import Json, Part, PartKind
from cluster.ingress.openai.parsing.text_reader import Markers, Reading, TextReader

ALL_CALLS = CallOptions()
"""No tools, so no calls."""
_LINE_ENDS = re.compile(r"\n*")
_WHITE_SPACE = " \t\r\n\f\v"
_NO_MARKERS = ReasoningFormat("none")


class AnswerParser:
    """Separates the text of one choice. The result does not depend on how the text is split."""

    def __init__(
        self,
        call_prefix: str,
        form: AnswerFormat,
        options: CallOptions = ALL_CALLS,
        *,
        include_reasoning: bool = True,
    ) -> None:
        """`call_prefix`: beginning of the ids of calls, so that a repeated answer has the same ones."""
        self._call_prefix = call_prefix
        self._options = options
        self._include_reasoning = include_reasoning
        self._reasoning = form.reasoning or _NO_MARKERS
        self._begins_inside = form.begins_in_reasoning
        self._whole: dict[PartKind, list[str]] = {}
        self._calls: list[Json] = []
        self._parts: list[Part] = []
        self._reader = TextReader()
        self._call_reader = None
        if form.calls is not None:
            self._call_reader = CallReader(self._reader, form.calls, options, self._parts.append)
        self._has_calls = False
        self._is_stopped = False
        openings = () if self._call_reader is None else tuple(self._call_reader.openings)
        left_out = (*self._reasoning.markers_left_out, self._reasoning.frame[1])
        again = self._reasoning.opening if self._reasoning.repeats else ""
        self._markers = {
            PartKind.REASONING: _beginnings(self._reasoning.closing, *openings),
            PartKind.CONTENT: _beginnings(again, *left_out, *openings),
        }
        self._is_framed = False
        self._steps = self._answer()
        next(self._steps)

    @property
    def ends_with_calls(self) -> bool:
        """Whether the answer has calls of tools, and does not end within one."""
        return self._has_calls and self._call_reader is not None and not self._call_reader.is_inside

    def delta(self, text: str) -> Json:
        """Add text. Returns the fields of a delta; none if nothing is certain."""
        return self._fields(self.parts(text))

    def last_delta(self, *, stopped: bool) -> Json:
        """End the answer: by its length, or `stopped` by a stop. Returns the fields of a delta."""
        return self._fields(self.last_parts(stopped=stopped))

    def message(self, text: str, *, stopped: bool = True) -> Json:
        """Return the fields of the message whose text is `text`."""
        for part in (*self.parts(text), *self.last_parts(stopped=stopped)):
            self._field(part)
        content = "".join(self._whole.get(PartKind.CONTENT, ()))
        reasoning = "".join(self._whole.get(PartKind.REASONING, ()))
        found: Json = {"content": content if content or not self._calls else None}
        if reasoning:
            found["reasoning_content"] = found["reasoning"] = reasoning
        if self._calls:
            found["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self._calls
            ]
        return found

    def parts(self, text: str) -> list[Part]:
        """Add text, and return the parts that are certain."""
        self._reader.text += text
        next(self._steps, None)
        return self._taken()

    def last_parts(self, *, stopped: bool) -> list[Part]:
        """End the answer: by its length, or `stopped` by a stop. Returns what was held back."""
        self._reader.is_final, self._is_stopped = True, stopped
        if self._call_reader is not None:
            self._call_reader.is_stopped = stopped
        next(self._steps, None)
        if self._call_reader is not None:
            self._parts += self._call_reader.rest(stopped=stopped)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = [*self._parts]
        self._parts.clear()
        self._has_calls = self._has_calls or any(part.kind is PartKind.CALL for part in parts)
        return parts

    def _fields(self, parts: list[Part]) -> Json:
        return _merged([self._field(part) for part in parts])

    def _field(self, part: Part) -> Json:
        """Record a part, and return it as the field of a delta."""
        if part.kind is PartKind.CALL:
            index = len(self._calls)
            function = {"name": part.text, "arguments": ""}
            call = {"index": index, "id": f"{self._call_prefix}{index}", "type": "function", "function": function}
            self._calls.append({**call, "function": dict(function)})
            return {"tool_calls": [call]}
        if part.kind is PartKind.ARGUMENTS:
            self._calls[-1]["function"]["arguments"] += part.text
            return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": part.text}}]}
        self._whole.setdefault(part.kind, []).append(part.text)
        if part.kind is PartKind.CONTENT:
            return {"content": part.text}
        return {"reasoning_content": part.text, "reasoning": part.text}  # the second is vLLM's name

    # The answer, as a reading that waits for more text

    def _answer(self) -> Reading[None]:
        yield  # until text arrives
        reader, form = self._reader, self._reasoning
        is_inside = (form.reasons and (yield from reader.literal(form.opening))) or self._begins_inside
        is_first = True
        while True:
            if is_first and form.reasons:
                yield from reader.run(_LINE_ENDS)
            if is_first and not is_inside:
                yield from self._begin_content()
            kind = PartKind.REASONING if is_inside else PartKind.CONTENT
            if (yield from reader.until(self._markers[kind], partial(self._text, kind), _WHITE_SPACE)) is None:
                return
            start = reader.at
            yield from reader.spaces()
            found = yield from self._marker(kind)
            if found is None:
                end = reader.at + 1
                if self._is_cut_call:
                    end = len(reader.text)
                else:
                    self._text(kind, reader.text[start:end])
                reader.at, is_first = end, False
            else:
                is_first, is_inside = found is not kind, found is PartKind.REASONING

    def _begin_content(self) -> Reading[None]:
        """Read calls that no marker announces, or what precedes the content."""
        reader, opening = self._reader, self._reasoning.frame[0]
        if self._call_reader is not None and (yield from self._call_reader.read(at_beginning=True)):
            yield from reader.spaces()
        elif opening and (yield from reader.literal(opening)):
            self._is_framed = True
            yield from reader.spaces()

    def _marker(self, kind: PartKind) -> Reading[PartKind | None]:
        """Read the marker or the calls at this place. Returns what follows, or `None` if they are text."""
        reader, form = self._reader, self._reasoning
        if self._call_reader is not None and (yield from self._call_reader.read(at_beginning=False)):
            yield from reader.spaces()
            return kind
        if kind is PartKind.REASONING:
            return PartKind.CONTENT if (yield from reader.literal(form.closing)) else None
        if form.repeats and (yield from reader.literal(form.opening)):
            return PartKind.REASONING
        for marker in (*form.markers_left_out, *([form.frame[1]] if self._is_framed and form.frame[1] else ())):
            if (yield from reader.literal(marker)):
                yield from reader.spaces()
                return kind
        return None

    @property
    def _is_cut_call(self) -> bool:
        """Whether a stop has ended the answer within the beginning of a call, which is then left out."""
        calls = self._call_reader
        return calls is not None and calls.is_cut and self._is_stopped and self._options.whole

    def _text(self, kind: PartKind, text: str) -> None:
        is_left_out = self._options.forced if kind is PartKind.CONTENT else not self._include_reasoning
        if text and not is_left_out:
            self._parts.append(Part(kind, text))


def _beginnings(*markers: str) -> Markers:
    """Return the beginnings of texts, up to white space or `*`."""
    return Markers(marker.split("*")[0].split()[0] for marker in markers if marker)


def _merged(fields: list[Json]) -> Json:
    """Join the fields of several parts: texts are added, and of each call there is one entry.

    Clients that take the first entry of a chunk, or the first chunk as it is, would lose the arguments in a second one.
    """
    found: Json = {}
    for one in fields:
        for name, value in one.items():
            if name not in found:
                found[name] = value
            else:
                found[name] = _with_call(found[name], *value) if name == "tool_calls" else found[name] + value
    return found


def _with_call(calls: list[Json], call: Json) -> list[Json]:
    """Return the entries of calls with one more, which may continue the last one."""
    *before, last = calls
    if last["index"] != call["index"]:
        return [*calls, call]
    arguments = last["function"]["arguments"] + call["function"]["arguments"]
    return [*before, {**last, "function": {**last["function"], "arguments": arguments}}]
