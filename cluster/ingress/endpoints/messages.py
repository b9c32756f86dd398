"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the same chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from cluster.core.bounds import MAX_JSON_DEPTH
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.core.json_text import find_half, find_infinite, is_deeper_than
from cluster.ingress.client import ServiceClient
from cluster.ingress.endpoints.bodies import read_parsed
from cluster.ingress.endpoints.chat_adapter import Event, Names, own_names, respond, with_one_system
from cluster.ingress.openai.chat_input import chat_input
from cluster.ingress.openai.errors import ErrorResponse, anthropics_error
from cluster.ingress.openai.fields.types import StrictModel, Text, Texts, UInt32, Untyped, Untypeds
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.parsing.parts import Json, Part, PartKind
from cluster.ingress.openai.requests import ChatRequest
from cluster.ingress.openai.responses import reduced_tokens
from pilotfish.v1 import generation_pb2

_STOP_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "end_turn",
    generation_pb2.FINISH_REASON_LENGTH: "max_tokens",
    generation_pb2.FINISH_REASON_ABORT: "pause_turn",
}
"""Sent back as it is, an aborted answer is continued, as what Anthropic names a paused turn is."""
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_NAMES = {
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"response_format\b": "output_config.format",
    r"stop\b": "stop_sequences",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
}
"""Names of Anthropic's API for fields that OpenAI's names otherwise; see `own_names`."""


_HOSTED_BLOCKS = ("server_tool_use", "mcp_tool_use", "search_tool_result", "execution_tool_result", "mcp_tool_result")
"""Endings of the types of blocks in which earlier answers used tools that Anthropic runs. They are left out."""


class ConversationBody(StrictModel):
    """The body of `POST /v1/messages/count_tokens`: what a model reads before its answer."""

    model: Text | None = None
    """A served name of the model."""
    messages: Untypeds
    """The conversation: texts, or lists of blocks, of the roles `user`, `assistant` and `system`. The answer continues
    a last message of the assistant that is text."""
    system: Text | Untypeds | None = None
    """What the system says first."""
    tools: Untypeds = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: Untyped | None = None
    """`auto`, `none`, `any` (a call of any tool) or `tool` (a call of the named one)."""
    thinking: Untyped | None = None
    """`disabled`, `adaptive`, or `enabled` with `budget_tokens`, after which the end of thinking is forced."""
    output_config: Untyped | None = None
    """`format` is the JSON schema of the answer; `effort` becomes `reasoning_effort` in the model's chat template."""
    output_format: Untyped | None = None
    """The older name of `output_config.format`."""

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Fields without effect. The form of a text is among them where the answer must be a call of a tool."""
        forms = {"output_config.format": (self.output_config or {}).get("format"), "output_format": self.output_format}
        is_call = (self.tool_choice or {}).get("type") in ("any", "tool")
        ignored = [name for name, form in forms.items() if is_call and form is not None]
        kinds = [block.get("type") for message in self.messages for block in _blocks_of(message)]
        left_out = [f"messages.{kind}" for kind in kinds if isinstance(kind, str) and kind.endswith(_HOSTED_BLOCKS)]
        return (*super().ignored_fields, *ignored, *left_out)


class MessagesBody(ConversationBody):
    """The body of `POST /v1/messages`."""

    max_tokens: UInt32
    """Most tokens of the answer."""
    stop_sequences: Texts = Field(default_factory=list)
    """Strings that end the answer."""
    stream: bool = False
    """Send server-sent events while the answer is generated."""
    temperature: float | None = None
    """Logits are divided by it."""
    top_p: float | None = None
    """Keep the smallest set of most probable tokens whose probability reaches it."""
    top_k: int | None = None
    """Keep this many of the most probable tokens."""
    store: Literal[False] | None = None
    """`false`: the texts are neither learned from nor stored, even if the API key allows it.
    Anthropic has no such field."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """No effect: labels that the client chooses."""
    service_tier: Literal["auto", "standard_only"] = "auto"
    """No effect."""


def add_messages(app: FastAPI, client: ServiceClient, limits: LimitsSection) -> None:
    """Add the routes."""

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        body, headers = await read_parsed(MessagesBody, request, limits)
        answering = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "store": body.store,
        }
        adapter = _Message(request.state.request_id, _names(body))
        with own_names(adapter.names):
            chat = parse(ChatRequest, json.dumps({**await _chat(body, client), **answering}).encode())
            return await respond(request, client, limits, chat, adapter, headers)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body, headers = await read_parsed(ConversationBody, request, limits)
        with own_names(_names(body)):
            chat = parse(ChatRequest, json.dumps(await _chat(body, client)).encode())
            conversation = chat_input(chat, chat.messages)
            found = await client.tokenize(generation_pb2.TokenizeRequest(model=body.model, chat=conversation))
        return JSONResponse({"input_tokens": len(found.token_ids)}, headers=dict(headers))


def _names(body: ConversationBody) -> Names:
    bound = "user: the model's template changes the last message, so no answer can continue it"
    last = InvalidRequest(f"messages[{len(body.messages) - 1}].role", "assistant", bound)
    return {**_NAMES, "continue_final_message": last}


async def _chat(body: ConversationBody, client: ServiceClient) -> Json:
    """Return the conversation of a chat in OpenAI's API. Raises `InvalidRequest`."""
    turns = _all_turns(body)
    is_continued = _is_begun(turns) and not await _reads_sources(client)
    chat: Json = {"model": body.model, "messages": turns, "continue_final_message": is_continued}
    if body.tools:
        chat["tools"] = [_tool(f"tools[{position}]", tool) for position, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        kind = body.tool_choice.get("type")
        if kind == "tool":
            chat["tool_choice"] = {"function": {"name": body.tool_choice.get("name")}}
        elif isinstance(kind, str) and kind in _CHOICES:
            chat["tool_choice"] = _CHOICES[kind]
        else:
            raise InvalidRequest("tool_choice.type", kind, "auto, none, any or tool")
        if body.tool_choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    if body.thinking is not None:
        chat |= _thinking(body.thinking)
    return chat | _output(body, chat.get("chat_template_kwargs", {}))


def _all_turns(body: ConversationBody) -> list[Json]:
    turns = [{"role": "system", "content": _text("system", body.system)}] if body.system else []
    for position, message in enumerate(body.messages):
        turns += _turns(f"messages[{position}]", message)
    return with_one_system(turns)


def _is_begun(turns: list[Json]) -> bool:
    """Whether the last message is the beginning of the answer: a text of the assistant."""
    last = turns[-1] if turns else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


async def _reads_sources(client: ServiceClient) -> bool:
    """Whether the model is an encoder-decoder: its answers do not continue what it reads."""
    kinds = [model.kind for model in await client.list_models()]
    return generation_pb2.MODEL_KIND_ENCODER_DECODER in kinds


def _output(body: ConversationBody, arguments: Json) -> Json:
    """Convert what is said of the answer's form and effort. `arguments` are those of the template so far."""
    chat: Json = {}
    config = body.output_config or {}
    if config.get("effort") is not None:
        if config["effort"] not in _EFFORTS:
            raise InvalidRequest("output_config.effort", config["effort"], ", ".join(_EFFORTS))
        chat["chat_template_kwargs"] = {**arguments, "reasoning_effort": config["effort"]}
    for field, form in (("output_config.format", config.get("format")), ("output_format", body.output_format)):
        if form is not None:
            chat["response_format"] = _response_format(field, form)
    return chat


def _response_format(field: str, form: object) -> Json:
    """Return the form of an answer as OpenAI's API has it. Raises `InvalidRequest`."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequest(field, form, "an object with the type json_schema and a schema")
    if not isinstance(form.get("schema"), dict):
        raise InvalidRequest(f"{field}.schema", form.get("schema"), "a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


def _thinking(thinking: Json) -> Json:
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type", kind, "enabled, disabled or adaptive")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise InvalidRequest("thinking.budget_tokens", budget, "an integer of at least 0")
    return {
        "chat_template_kwargs": {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"},
        "thinking_token_budget": budget if kind == "enabled" else None,
    }


def _turns(field: str, message: Json) -> Iterator[Json]:
    """Convert one message. Results of tools become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{field}.role", role, "user, assistant or system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{field}.content", content, "a text or a list of blocks")
    if role == "system":
        yield {"role": role, "content": _text(f"{field}.content", content)}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for position, block in enumerate(content):
        place = f"{field}.content[{position}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text(place, [block]))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": _written(block.get("input"))}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind == "tool_result":
            result = _text(f"{place}.content", block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind != "redacted_thinking" and not (isinstance(kind, str) and kind.endswith(_HOSTED_BLOCKS)):
            raise UnsupportedParameter(f"{place}.type", kind, "text, thinking, tool_use or tool_result")
    if texts or calls:
        reasoning = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": "\n".join(texts), **({"tool_calls": calls} if calls else {}), **reasoning}


def _blocks_of(message: Json) -> list[Json]:
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _text(field: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, content, "a text or a list of text blocks")
    for block in content:
        if not (isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)):
            raise UnsupportedParameter(field, block, "text blocks")
    return "\n".join(block["text"] for block in content)


def _tool(field: str, tool: Json) -> Json:
    if tool.get("type", "custom") != "custom":
        raise UnsupportedParameter(f"{field}.type", tool["type"], "custom: no other tool is supported")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    return {"type": "function", "function": function | {n: tool[n] for n in ("description",) if n in tool}}


class _Message:
    """A message of the assistant in Anthropic's form."""

    def __init__(self, request_id: str, names: Names) -> None:
        self.names = names
        self._id = f"msg_{request_id}"
        self._model = ""
        self._blocks: list[Json] = []
        self._arguments = ""
        self._ending: Json = {"stop_reason": None, "stop_sequence": None}
        self._usage: Json = {"input_tokens": 0, "output_tokens": 0}
        self._receipt: Json = {}

    def begin(self, started: generation_pb2.GenerationStarted) -> Iterable[Event]:
        self._model = started.model
        self._usage = {"input_tokens": started.prompt_tokens, "output_tokens": 0}
        yield "message_start", {"type": "message_start", "message": self.whole()}

    def add(self, part: Part) -> Iterable[Event]:
        if part.kind is PartKind.CALL:
            call_id = f"toolu_{self._id[4:36]}_{len(self._blocks)}"
            yield from self._open({"type": "tool_use", "id": call_id, "name": part.text, "input": {}})
        elif part.kind is PartKind.ARGUMENTS:
            self._arguments += part.text
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif part.kind is PartKind.CONTENT:
            if not self._blocks or self._blocks[-1]["type"] != "text":
                yield from self._open({"type": "text", "text": ""})
            self._blocks[-1]["text"] += part.text
            yield self._delta({"type": "text_delta", "text": part.text})
        else:
            if not self._blocks or self._blocks[-1]["type"] != "thinking":
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
            self._blocks[-1]["thinking"] += part.text
            yield self._delta({"type": "thinking_delta", "thinking": part.text})

    def score(self, logprobs: Iterable[Json]) -> None:
        """Do nothing: the API has no log-probabilities."""

    def end(self, finished: generation_pb2.GenerationFinished, receipt: Json, *, with_calls: bool) -> Iterable[Event]:
        yield from self._close()
        usage = finished.usage
        self._usage = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            **reduced_tokens([usage]),
        }
        reason, sequence = _STOP_REASONS[finished.reason], None
        if finished.HasField("stop_string"):
            reason, sequence = "stop_sequence", finished.stop_string
        elif reason == "end_turn" and with_calls:
            reason = "tool_use"
        self._ending = {"stop_reason": reason, "stop_sequence": sequence}
        self._receipt = {"receipt": receipt}
        yield "message_delta", {"type": "message_delta", "delta": self._ending, "usage": self._usage, **self._receipt}
        yield "message_stop", {"type": "message_stop"}

    def whole(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            **self._ending,
            "usage": self._usage,
            **self._receipt,
        }

    def error(self, error: ErrorResponse) -> Event:
        return "error", anthropics_error(error.status, error.message)

    def _open(self, block: Json) -> Iterable[Event]:
        yield from self._close()
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _close(self) -> Iterable[Event]:
        if not self._blocks:
            return
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _parsed(self._arguments)
            self._arguments = ""
        yield "content_block_stop", {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: Json) -> Event:
        return "content_block_delta", {
            "type": "content_block_delta",
            "index": len(self._blocks) - 1,
            "delta": delta,
        }


def _written(value: object) -> str:
    """Return the arguments of an earlier call as the model wrote them, see `_parsed`."""
    if isinstance(value, dict) and set(value) == {"partial_json"} and isinstance(value["partial_json"], str):
        return value["partial_json"]
    return value if isinstance(value, str) else json.dumps(value or {})


_MOST_LEVELS = MAX_JSON_DEPTH - 8
"""Deepest nesting of the arguments of a call, which come back inside of the body of a later request."""


def _parsed(arguments: str) -> Json:
    """Return the arguments of a call as an object.

    Those that the end of the answer cut off, that are nested too deep to come back, whose strings have half of a
    surrogate pair, or whose numbers are not finite, are no JSON that can be sent.
    """
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return {"partial_json": arguments}
    if not isinstance(value, dict):
        return {}
    is_whole = find_half(value) is None and find_infinite(value) is None and not is_deeper_than(value, _MOST_LEVELS)
    return value if is_whole else {"partial_json": arguments}
