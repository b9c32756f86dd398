"""Translate the conversation of a chat, its tools and what its template reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.ingress.openai.fields.tools import ChatExtensions, check_tool_choice, required_tool
from cluster.ingress.openai.requests import ChatTurn
from pilotfish.v1 import generation_pb2


def chat_input(body: ChatExtensions, messages: Sequence[ChatTurn]) -> generation_pb2.ChatInput:
    """Return the conversation of a chat. Raises `InvalidRequest` (`tool_choice`)."""
    check_tool_choice(body)
    return generation_pb2.ChatInput(
        messages=map(_message, messages),
        tools=[json.dumps(tool, ensure_ascii=False) for tool in body.tools] if body.offers_tools else [],
        template_arguments=_template_arguments(body),
        continue_final_message=body.continue_final_message,
        add_generation_prompt=body.add_generation_prompt,
        required_tool=required_tool(body),
        single_call=not body.parallel_tool_calls,
    )


def _template_arguments(body: ChatExtensions) -> str:
    arguments: dict[str, Any] = {}
    if body.documents:
        arguments["documents"] = body.documents
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        arguments |= {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    arguments |= body.chat_template_kwargs
    return json.dumps(arguments, ensure_ascii=False) if arguments else ""


def _message(turn: ChatTurn) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(
        role=turn.role,
        content=turn.content if isinstance(turn.content, str) else "",
        content_parts=() if isinstance(turn.content, str) else turn.content,
        name=turn.name,
        tool_calls=[
            generation_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in turn.tool_calls
        ],
        tool_call_id=turn.tool_call_id,
        reasoning=turn.reasoning_content,
    )
