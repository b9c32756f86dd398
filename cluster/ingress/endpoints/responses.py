"""`POST /v1/responses`: OpenAI's newer API over the same chats. Conversations are kept for a while, in memory."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.ingress.access.http_access import named
from cluster.ingress.client import ServiceClient
from cluster.ingress.endpoints.bodies import read_parsed
from cluster.ingress.endpoints.chat_adapter import Event, own_names, respond, with_one_system
from cluster.ingress.endpoints.responses_body import ResponsesBody
from cluster.ingress.openai.errors import ErrorResponse
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.parsing.parts import Json, Part, PartKind
from cluster.ingress.openai.requests import ChatRequest, part_text
from cluster.ingress.openai.responses import reduced_tokens
from pilotfish.v1 import generation_pb2

_NAMES = {
    r"response_format(\.json_schema)?\b": "text.format",
    r"max_tokens\b": "max_output_tokens",
    r"messages\b.*": "input",
    r"reasoning_effort\b": "reasoning.effort",
}
"""Names of this API for fields that chats name otherwise; see `own_names`."""
_STATUSES = {
    generation_pb2.FINISH_REASON_STOP: "completed",
    generation_pb2.FINISH_REASON_LENGTH: "incomplete",
    generation_pb2.FINISH_REASON_ABORT: "cancelled",
}


def add_responses(app: FastAPI, client: ServiceClient, limits: LimitsSection) -> None:
    """Add the route."""
    conversations = Conversations()

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body, headers = await read_parsed(ResponsesBody, request, limits)
        caller = named(generation_pb2.GenerateRequest()).client
        before = [] if body.previous_response_id is None else conversations.find(body.previous_response_id, caller)
        turns = [*before, *_turns(body.input)]
        adapter = _ResponseObject(f"resp_{request.state.request_id}", body)
        with own_names(adapter.names):
            chat = parse(ChatRequest, json.dumps(_chat(body, turns)).encode())
        if body.store:

            def keep(answer: Json) -> None:
                conversations.keep(adapter.id, caller, [*turns, answer])

            adapter.on_end = keep
        with own_names(adapter.names):
            return await respond(request, client, limits, chat, adapter, headers)


def _names_of(body: ResponsesBody) -> Mapping[str, str]:
    """Return the names of fields in a body, of whose tools a chat has the functions alone."""
    places = (place for place, tool in enumerate(body.tools) if tool.get("type") == "function")
    return {rf"tools\[{own}\](\.function)?": f"tools[{place}]" for own, place in enumerate(places)} | _NAMES


def _chat(body: ResponsesBody, turns: list[Json]) -> Json:
    """Return the body of the same chat in the older API. Raises `InvalidRequest`."""
    if body.instructions:
        turns = with_one_system([{"role": "system", "content": body.instructions}, *turns])
    chat: Json = {
        "model": body.model,
        "messages": turns,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "parallel_tool_calls": body.parallel_tool_calls,
        "store": None if body.store else False,
    }
    if body.functions:
        chat["tools"] = [_tool(tool) for tool in body.functions]
    if body.functions or body.tool_choice not in (None, "auto", "none"):
        choice = body.tool_choice
        chat["tool_choice"] = {"function": {"name": choice.get("name")}} if isinstance(choice, dict) else choice
    if body.includes_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.get("effort")
    if body.text is not None and body.text.get("format") is not None:
        chat["response_format"] = _format(body.text["format"])
    return chat


def _format(value: Any) -> Any:
    """The form of an answer as chats have it, where the schema is inside of `json_schema`."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value[name] for name in value if name != "type"}}
    return value


def _tool(tool: Json) -> Json:
    return {"type": "function", "function": {name: tool[name] for name in tool if name not in ("type", "strict")}}


def _turns(items: str | list[dict[str, Any]]) -> list[Json]:
    """Convert the input to messages: calls belong to the answer before them. Raises `InvalidRequest` (`input…`)."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    turns: list[Json] = []
    thought: Json = {}
    for position, item in enumerate(items):
        field, kind = f"input[{position}]", item.get("type", "message")
        if kind == "reasoning":
            thought = _thought(field, item)
        elif kind == "message":
            own, thought = (thought, {}) if item.get("role") == "assistant" else ({}, thought)
            turns.append({"role": item.get("role"), "content": _text(f"{field}.content", item.get("content")), **own})
        elif kind == "function_call":
            if thought or not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": "", **thought})
                thought = {}
            turns[-1].setdefault("tool_calls", []).append(_call(item))
        elif kind == "function_call_output":
            content = _text(f"{field}.output", item.get("output"))
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "item_reference" or not isinstance(kind, str):
            raise UnsupportedParameter(f"{field}.type", kind, "message, function_call or function_call_output")
    return turns


def _call(item: Json) -> Json:
    """Return a call of an earlier answer as chats have it."""
    function = {"name": item.get("name") or "", "arguments": item.get("arguments")}
    return {"id": item.get("call_id") or "", "type": "function", "function": function}


def _thought(field: str, item: Json) -> Json:
    """Return what an earlier answer thought as a field of the message that follows it; nothing if it is not told."""
    texts = [
        _text(f"{field}.{name}", [{**part, "type": "text"} if isinstance(part, dict) else part for part in item[name]])
        for name in ("summary", "content")
        if isinstance(item.get(name), list)
    ]
    return {"reasoning_content": texts[-1] or texts[0]} if any(texts) else {}


def _text(field: str, content: object) -> str:
    parts = content if isinstance(content, list) else [content]
    return "".join(part_text(f"{field}[{position}]", part) for position, part in enumerate(parts))


class _ResponseObject:
    """A response, and the events of its stream."""

    def __init__(self, response_id: str, body: ResponsesBody) -> None:
        self.id = response_id
        self.names = _names_of(body)
        self.on_end: Callable[[Json], None] = lambda _: None
        """Called with the assistant's message when the answer has ended."""
        self._body = body
        self._created = time.time()
        self._model = ""
        self._status = "in_progress"
        self._incomplete: Json | None = None
        self._usage: Json | None = None
        self._receipt: Json = {}
        self._items: list[Json] = []
        self._scored: list[Json] = []
        """The log-probabilities of tokens whose text is not sent yet."""
        self._sequence = -1

    def begin(self, started: generation_pb2.GenerationStarted) -> Iterable[Event]:
        self._model = started.model
        yield self._event("response.created", response=self.whole())
        yield self._event("response.in_progress", response=self.whole())

    def score(self, logprobs: Iterable[Json]) -> None:
        self._scored += logprobs

    def add(self, part: Part) -> Iterable[Event]:
        if part.kind is not PartKind.CONTENT:
            self._scored = []  # only texts have log-probabilities
        if part.kind is PartKind.CALL:
            number = len(self._items)
            names = {"call_id": f"call_{self.id[5:37]}_{number}", "name": part.text, "arguments": ""}
            yield from self._open({"type": "function_call", "id": f"fc_{self.id[5:]}_{number}", **names})
        elif part.kind is PartKind.ARGUMENTS:
            self._items[-1]["arguments"] += part.text
            yield self._in_item("response.function_call_arguments.delta", delta=part.text)
        elif part.kind is PartKind.CONTENT:
            if not self._items or self._items[-1]["type"] != "message":
                yield from self._open_message()
            self._items[-1]["content"][0]["text"] += part.text
            scored = self._take_scored()
            yield self._in_item("response.output_text.delta", content_index=0, delta=part.text, logprobs=scored)
        else:
            if not self._items or self._items[-1]["type"] != "reasoning":
                identity = f"rs_{self.id[5:]}_{len(self._items)}"
                item: Json = {"type": "reasoning", "id": identity, "summary": [], "encrypted_content": None}
                yield from self._open({**item, "content": [{"type": "reasoning_text", "text": ""}]})
            self._items[-1]["content"][0]["text"] += part.text
            yield self._in_item("response.reasoning_text.delta", content_index=0, delta=part.text)

    def end(self, finished: generation_pb2.GenerationFinished, receipt: Json, *, with_calls: bool) -> Iterable[Event]:
        if not self._items:
            yield from self._open_message()
        if self._items[-1]["type"] == "message":
            self._take_scored()  # that of a token which ended the answer
        is_cut = finished.reason != generation_pb2.FINISH_REASON_STOP
        is_whole = not is_cut and (with_calls or self._items[-1]["type"] != "function_call")
        yield from self._close("completed" if is_whole else "incomplete")
        usage = finished.usage
        self._usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **reduced_tokens([usage]),
        }
        self._receipt = {"receipt": receipt}
        self._status = _STATUSES[finished.reason]
        self._incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        self.on_end(self._turn())
        # The API has no event for the end of an aborted answer.
        yield self._event(f"response.{'incomplete' if is_cut else 'completed'}", response=self.whole())

    def whole(self) -> Json:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": self._incomplete,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "max_output_tokens": body.max_output_tokens,
            "text": body.text or {"format": {"type": "text"}},
            "usage": self._usage,
            **self._receipt,
        }

    def error(self, error: ErrorResponse) -> Event:
        kind, event = self._event("error")
        return kind, error.fields | event

    def _take_scored(self) -> list[Json]:
        """Move the log-probabilities of tokens into the text that is open, and return them."""
        scored, self._scored = self._scored, []
        self._items[-1]["content"][0]["logprobs"] += scored
        return scored

    def _turn(self) -> Json:
        """Return the assistant's message, as a later request continues it."""
        texts = [item["content"][0]["text"] for item in self._items if item["type"] == "message"]
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {name: item[name] for name in ("name", "arguments")},
            }
            for item in self._items
            if item["type"] == "function_call" and item["status"] == "completed"
        ]
        thought = "".join(item["content"][0]["text"] for item in self._items if item["type"] == "reasoning")
        more = {"tool_calls": calls, "reasoning_content": thought}
        return {"role": "assistant", "content": "".join(texts), **{name: more[name] for name in more if more[name]}}

    def _open_message(self) -> Iterable[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{self.id[5:]}_{len(self._items)}", "role": "assistant", "content": []}
        yield from self._open(item)
        self._items[-1]["content"] = [part]
        yield self._in_item("response.content_part.added", content_index=0, part={**part, "logprobs": []})

    def _open(self, item: Json) -> Iterable[Event]:
        yield from self._close("completed")
        self._items.append({**item, "status": "in_progress"})
        begun = copy.deepcopy(self._items[-1])  # its text grows before the event is sent
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun)

    def _close(self, status: str) -> Iterable[Event]:
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            scored = part["logprobs"]
            yield self._in_item("response.output_text.done", content_index=0, text=part["text"], logprobs=scored)
            yield self._in_item("response.content_part.done", content_index=0, part=dict(part))
        elif item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield self._in_item("response.function_call_arguments.done", **arguments)
        else:
            yield self._in_item("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _in_item(self, kind: str, /, **data: Any) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, item_id=self._items[-1]["id"], **data)

    def _event(self, kind: str, /, **data: Any) -> Event:
        self._sequence += 1
        return kind, {"type": kind, "sequence_number": self._sequence, **data}


MAX_STORED = 1024
"""Most conversations that are kept."""
MAX_STORED_CHARS = 1 << 24
"""Most characters of all conversations that are kept."""


class Conversations:
    """The latest conversations by the id of their last response, and the name of the client that may continue them.

    Room is taken from the client that has the most, so that nobody drops the conversations of others.
    """

    def __init__(self, most: int = MAX_STORED, most_chars: int = MAX_STORED_CHARS) -> None:
        self._most = most
        self._most_chars = most_chars
        self._chars = 0
        self._stored: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def keep(self, response_id: str, client: str, turns: list[Json]) -> None:
        """Keep a conversation. The oldest ones of the client that has the most are dropped to make room."""
        text = json.dumps(turns, ensure_ascii=False)
        self._stored[response_id] = (client, text)
        self._chars += len(text)
        while self._stored and (len(self._stored) > self._most or self._chars > self._most_chars):
            largest = self._largest()
            oldest = next(one for one, (owner, _) in self._stored.items() if owner == largest)
            self._chars -= len(self._stored.pop(oldest)[1])

    def find(self, response_id: str, client: str) -> list[Json]:
        """Return the messages up to a response. Raises `InvalidRequest` (`previous_response_id`)."""
        owner, text = self._stored.get(response_id, ("", ""))
        if not text or owner != client:
            raise InvalidRequest(
                "previous_response_id", response_id, "the id of a response that this server still keeps"
            )
        turns: list[Json] = json.loads(text)
        return turns

    def _largest(self) -> str:
        """The client with the largest share of what may be kept."""
        shares: Counter[str] = Counter()
        for owner, text in self._stored.values():
            shares[owner] += self._most_chars + self._most * len(text)
        return max(shares, key=lambda owner: shares[owner])
