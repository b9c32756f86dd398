"""How reasoning and calls of tools are written in the text of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ToolFormat(StrEnum):
    """How a model writes calls of tools."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, also with a list: Hermes, Qwen, SmolLM."""
    LLAMA = "llama"
    """The whole answer is `{"name": …, "parameters": …}`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]`, then a list, or names with arguments."""

    @property
    def has_special_tokens(self) -> bool:
        """Whether special tokens mark the calls, so that they must be in the text."""
        return self is not ToolFormat.HERMES


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How reasoning and calls of tools are found in the text of an answer."""

    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; `None` if no tools were offered."""
    reasons: bool = False
    """Whether the model writes what it thinks between `<think>` and `</think>`."""
    begins_in_reasoning: bool = False
    """Whether the prompt ends after `<think>`."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether special tokens must be in the text."""
        return self.tool_format is not None and self.tool_format.has_special_tokens


TEXT_ONLY = AnswerFormat()
"""Neither reasoning nor calls of tools."""
