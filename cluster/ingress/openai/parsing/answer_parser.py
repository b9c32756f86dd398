"""Separates an answer into reasoning, content and calls of tools, whole or while it is streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.ingress.openai.parsing.call_parser import CallParser
from cluster.ingress.openai.parsing.parts import Json, Part, PartKind, undecided

_OPENING, _CLOSING = "<think>", "</think>"


class ReasoningParser:
    """Separates what a model thinks at the beginning of its answer from what follows."""

    def __init__(self, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt ends after `<think>`."""
        self._buffer = ""
        self._is_inside = begins_inside
        self._is_done = False
        self._is_first = True

    def push(self, text: str) -> tuple[str, str]:
        """Add text. Returns the reasoning and the other text that are certain."""
        self._buffer += text
        if not self._is_inside and not self._is_done:
            start = self._buffer.lstrip()
            if start.startswith(_OPENING):
                self._is_inside, self._buffer = True, start[len(_OPENING) :]
            elif _OPENING.startswith(start):
                return "", ""
            else:
                self._is_done = True
        if self._is_inside:
            return self._inside()
        text, self._buffer = self._buffer, ""
        if self._is_first:
            text = text.lstrip("\n")
            self._is_first = not text
        return "", text

    def flush(self) -> tuple[str, str]:
        """Return what was held back, at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        return (rest, "") if self._is_inside else ("", rest)

    def _inside(self) -> tuple[str, str]:
        if self._is_first:
            self._buffer = self._buffer.lstrip("\n")
        reasoning, found, after = self._buffer.partition(_CLOSING)
        if found:
            self._is_inside, self._is_done, self._is_first, self._buffer = False, True, True, ""
            return reasoning.rstrip("\n"), self.push(after)[1]
        certain = self._buffer[: len(self._buffer) - undecided(self._buffer, _CLOSING)].rstrip("\n")
        self._buffer = self._buffer[len(certain) :]
        self._is_first = self._is_first and not certain
        return certain, ""


@dataclass(slots=True)
class AnswerParser:
    """Separates the text of one choice. The result does not depend on how the text is split."""

    call_prefix: str
    """Beginning of the ids of calls. The ids depend on nothing else, so that a repeated answer has the same ones."""
    reasoning: ReasoningParser | None
    calls: CallParser | None
    include_reasoning: bool = True
    _whole: dict[PartKind, list[str]] = field(default_factory=dict)
    _calls: list[Json] = field(default_factory=list)
    _has_calls: bool = False
    _is_cut: bool = False
    """Whether the answer ends within a call."""

    @property
    def ends_with_calls(self) -> bool:
        """Whether the answer has calls of tools, and does not end within one."""
        return self._has_calls and not self._is_cut

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
        return self._noted(self._separated(*(("", text) if self.reasoning is None else self.reasoning.push(text))))

    def last_parts(self, *, stopped: bool) -> list[Part]:
        """End the answer: by its length, or `stopped` by a stop. Returns what was held back."""
        parts = [] if self.reasoning is None else self._separated(*self.reasoning.flush())
        if self.calls is None:
            return parts
        self._is_cut = self.calls.is_inside
        return self._noted([*parts, *self.calls.flush(stopped=stopped)])

    def _noted(self, parts: list[Part]) -> list[Part]:
        self._has_calls = self._has_calls or any(part.kind is PartKind.CALL for part in parts)
        return parts

    def _separated(self, reasoning: str, text: str) -> list[Part]:
        parts = [Part(PartKind.REASONING, reasoning)] if reasoning and self.include_reasoning else []
        if text:
            parts += [Part(PartKind.CONTENT, text)] if self.calls is None else self.calls.push(text)
        return parts

    def _fields(self, parts: list[Part]) -> Json:
        return _merged([self._field(part) for part in parts])

    def _field(self, part: Part) -> Json:
        """Record a part, and return it as the field of a delta."""
        if part.kind is PartKind.CALL:
            index = len(self._calls)
            function = {"name": part.text, "arguments": ""}
            call = {"index": index, "id": f"{self.call_prefix}{index}", "type": "function", "function": function}
            self._calls.append({**call, "function": dict(function)})
            return {"tool_calls": [call]}
        if part.kind is PartKind.ARGUMENTS:
            self._calls[-1]["function"]["arguments"] += part.text
            return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": part.text}}]}
        self._whole.setdefault(part.kind, []).append(part.text)
        if part.kind is PartKind.CONTENT:
            return {"content": part.text}
        return {"reasoning_content": part.text, "reasoning": part.text}  # the second is vLLM's name


def _merged(fields: list[Json]) -> Json:
    """Join the fields of several parts: texts are added, calls are listed."""
    found: Json = {}
    for one in fields:
        for name, value in one.items():
            found[name] = found[name] + value if name in found else value
    return found
