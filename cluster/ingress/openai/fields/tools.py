"""The parameters of chats that concern tools, reasoning and the model's template."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.ingress.openai.fields.types import FirstErrorOnly, StrictModel, Text, Untyped

MAX_TOOLS = 128


class NamedFunction(StrictModel):
    """The function that a call or a choice of tools names."""

    path: ClassVar[str] = "tool_choice.function."

    name: Text


class FunctionCall(StrictModel):
    """A function that the assistant called, and its arguments."""

    path: ClassVar[str] = "messages.tool_calls.function."

    name: Text = ""
    arguments: Text = "{}"
    """A JSON object, as text. What is none, because an answer was cut off, is shown to the model as it is."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return value or "{}" if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class ToolCall(StrictModel):
    """A call of a tool by the assistant, as an earlier response had it."""

    path: ClassVar[str] = "messages.tool_calls."

    id: Text = ""
    type: Literal["function"] = "function"
    index: int | None = None
    """No effect: the number that streamed calls have."""
    function: FunctionCall


class NamedTool(StrictModel):
    """A choice of one tool."""

    path: ClassVar[str] = "tool_choice."

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatExtensions(StrictModel):
    """Parameters of chats for tools, reasoning and the model's template."""

    tools: Annotated[list[Untyped], Field(max_length=MAX_TOOLS), FirstErrorOnly()] = Field(default_factory=list)
    """Functions that the model may call. Calls are found in the answer, also while it is streamed."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`auto` (the default with tools) lets the model choose; `none` does not offer the tools. With `required` or a
    named function, the answer is a call, and its arguments match the function's schema."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls; if not, only the first one is returned."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of a message of the assistant. Unset: unless
    `continue_final_message`."""
    continue_final_message: bool = False
    """Continue the last message instead of beginning a new one."""
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict)
    """Further variables of the model's template."""
    documents: Annotated[list[dict[Text, Any]], FirstErrorOnly()] = Field(default_factory=list)
    """Documents for the model's template. Templates that know none ignore them."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the model's template; `enable_thinking` and `thinking` follow from it unless they are given."""
    include_reasoning: bool = True
    """Return what the model thinks between `<think>` and `</think>`, as `reasoning_content`."""

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for position, tool in enumerate(value):
            _check_tool(f"tools[{position}]", tool)
        return value

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"


def _check_tool(field: str, tool: dict[str, Any]) -> None:
    """Check that a tool is a function with a name. Its parameters are not read here. Raises `InvalidRequest`."""
    if tool.get("type", "function") != "function":
        raise UnsupportedParameter(f"{field}.type", tool["type"], "function: no other tool is supported")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"{field}.function.name", name, f"a name of 1 to {MAX_NAME_CHARS} characters")


MAX_NAME_CHARS = 256


def check_tool_choice(body: ChatExtensions) -> None:
    """Refuse choices that cannot be kept. Raises `InvalidRequest` (`tool_choice`)."""
    choice = body.tool_choice
    if choice not in (None, "none") and not body.tools:
        raise InvalidRequest("tool_choice", _shown(choice), "left out unless there are tools")
    if isinstance(choice, NamedTool) and choice.function.name not in (
        str(tool["function"]["name"]) for tool in body.tools
    ):
        raise InvalidRequest("tool_choice", choice.function.name, "the name of one of the tools")


def required_tool(body: ChatExtensions) -> str | None:
    """Return the name of the tool that the answer must call, an empty text for any tool, or `None`."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return choice.function.name
    return "" if choice == "required" else None


def _shown(choice: object) -> object:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice
