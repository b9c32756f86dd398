"""Whether an answer is what the model writes: `POST /v1/verify`.

The answer is generated again without drafts, from the seed in its receipt, and compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.ingress.answers import answers
from cluster.ingress.asgi import timeout_of, while_connected
from cluster.ingress.client import ServiceClient
from cluster.ingress.endpoints.bodies import read_parsed
from cluster.ingress.openai.fields.types import Seed, StrictModel, Text, UInt32s
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters
from cluster.ingress.openai.responses import system_fingerprint
from cluster.ingress.openai.stream import Events
from cluster.ingress.openai.translate import chat_request, completion_requests
from pilotfish.v1 import generation_pb2

_REPLACED = {
    "n": 1,
    "best_of": None,
    "stream": False,
    "stream_options": None,
    "speculation": None,
    "prediction": None,
    "max_draft_tokens": 0,
    "request_id": None,
    "echo": None,
    "logprobs": None,
    "top_logprobs": None,
    "logprob_token_ids": None,
    "prompt_logprobs": None,
    "return_drafts": None,
}
"""Parameters that do not change an answer, and what they are replaced by."""


class SentReceipt(StrictModel):
    """The receipt of an answer, as its response had it. Only the seed is needed; the rest is reported again."""

    path: ClassVar[str] = "receipt."

    seed: Seed
    """The seed of the answer."""
    fingerprint: Text | None = None
    """The program that generated the answer."""


class VerifyBody(StrictModel):
    """The body of `POST /v1/verify`."""

    request: dict[str, Any]
    """The body of the request that was answered: a chat or a completion with one prompt."""
    receipt: SentReceipt
    """The receipt of the answer."""
    text: Text | None = None
    """The text of the answer."""
    token_ids: UInt32s | None = None
    """The tokens of the answer, instead of its text."""


@dataclass(slots=True)
class _Repeated:
    """The answer, generated again."""

    tokens: list[int]
    ends: list[int]
    """Length of the text after each token, in characters."""
    text: str = ""
    prompt: str = ""
    """The text of the prompt, if it is reported."""
    fingerprint: str = ""


def add_verification(app: FastAPI, client: ServiceClient, limits: LimitsSection) -> None:
    """Add the route."""

    @app.post("/v1/verify")
    async def verify(request: Request) -> Response:
        body, headers = await read_parsed(VerifyBody, request, limits)
        if (body.text is None) == (body.token_ids is None):
            raise InvalidRequest("text", body.text, "given, or token_ids, and not both")
        message = _request(body, limits, request.state.request_id)
        timeout = timeout_of(request, limits.max_timeout_seconds)
        answer = await while_connected(request, _repeat(answers(client, [message], timeout, streams=False), body))
        found, sent = _first_difference(answer, body), body.receipt.fingerprint
        if found is not None and body.text is not None and _echoes(body):
            prompts = (message.text or answer.prompt, answer.prompt)  # an echoed text may lack tokens in front of it
            if any(_has_prompt(body.text, prompt, answer.text) for prompt in prompts):
                raise InvalidRequest("text", body.text, "the text of the answer without its prompt")
        result = {
            "equal": found is None,
            "first_difference": found,
            "compared_tokens": len(answer.tokens),
            "seed": message.sampling.seed,
            "fingerprint": answer.fingerprint,
            "same_fingerprint": None if sent is None else sent == answer.fingerprint,
        }
        return JSONResponse(result, headers=headers)


def _request(body: VerifyBody, limits: LimitsSection, request_id: str) -> generation_pb2.GenerateRequest:
    """Return the request that generates the answer again, without drafts. Raises `InvalidRequest`."""
    seed = body.receipt.seed % (1 << 64)
    content = json.dumps({**body.request, **_REPLACED}).encode()
    parsed: Parameters
    if "messages" in body.request:
        parsed = chat = parse(ChatRequest, content, None)
        message = chat_request(chat, request_id, seed)
    else:
        parsed = completion = parse(CompletionRequest, content, None)
        message, *others = completion_requests(completion, limits, request_id, seed)
        if others:
            raise InvalidRequest("request.prompt", f"{len(others) + 1} prompts", "one prompt")
    if parsed.use_beam_search:
        raise InvalidRequest("request.use_beam_search", True, "false: a beam search has no seed")
    message.store = False  # a repeated text teaches nothing
    message.prompt_options.report |= _echoes(body)
    return message


def _echoes(body: VerifyBody) -> bool:
    return body.request.get("echo") is True


async def _repeat(responses: Events, body: VerifyBody) -> _Repeated:
    answer = _Repeated([], [])
    async with aclosing(responses):
        async for _, response in responses:
            if response.HasField("started"):
                answer.fingerprint = system_fingerprint(response.started)
                answer.prompt = b"".join(response.started.prompt_token_bytes).decode("utf-8", "replace")
                if body.text is not None and (response.started.tool_format or response.started.reasoning_format):
                    raise InvalidRequest("text", "sent", "left out: calls and reasoning are compared by token_ids")
            elif response.HasField("delta"):
                answer.text += response.delta.text
                answer.tokens.extend(response.delta.token_ids)
                answer.ends.extend([len(answer.text)] * len(response.delta.token_ids))
    return answer


def _first_difference(answer: _Repeated, body: VerifyBody) -> dict[str, object] | None:
    """Return the first token that differs, with what the model writes there and what was sent; `None` if none does."""
    if body.token_ids is not None:
        position = _common(answer.tokens, body.token_ids)
        if position == len(answer.tokens) == len(body.token_ids):
            return None
        return {
            "token": position,
            "expected": _at(answer.tokens, position),
            "found": _at(body.token_ids, position),
        }
    text = body.text or ""
    position = _common(answer.text, text)
    if position == len(answer.text) == len(text):
        return None
    token = next((index for index, end in enumerate(answer.ends) if end > position), len(answer.tokens))
    shown = slice(position, position + 40)
    return {"token": token, "character": position, "expected": answer.text[shown], "found": text[shown]}


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common beginning."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _has_prompt(text: str, prompt: str, answer: str) -> bool:
    """Whether a text begins with the prompt, and what follows agrees with the answer better than the whole does."""
    if not prompt or not text.startswith(prompt):
        return False
    rest = text[len(prompt) :]
    return rest == answer or _common(rest, answer) > _common(text, answer)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
