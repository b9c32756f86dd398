"""Parts of an answer: content, reasoning, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

Json = dict[str, Any]


class PartKind(Enum):
    """What a part of an answer is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"
    """A call begins; the text is the name of the tool."""
    ARGUMENTS = "arguments"
    """More of the arguments of the last call, as JSON text."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer."""

    kind: PartKind
    text: str
