"""The HTTP routes that convert text to tokens and back, as vLLM has them."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, field_validator

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.ingress.client import ServiceClient
from cluster.ingress.endpoints.bodies import read_parsed
from cluster.ingress.openai.chat_input import chat_input
from cluster.ingress.openai.fields.tools import ChatExtensions
from cluster.ingress.openai.fields.types import FirstErrorOnly, StrictModel, Text, UInt32s
from cluster.ingress.openai.requests import ChatTurn, plain_messages
from pilotfish.v1 import generation_pb2

_PART = 4096
"""Ids that are written at once."""


class TokenizeBody(ChatExtensions):
    """The body of `POST /tokenize`: a text, or a conversation."""

    model: Text | None = None
    """A served name of the model."""
    prompt: Text | None = None
    """The text."""
    messages: Annotated[list[ChatTurn], FirstErrorOnly()] | None = None
    """The conversation, which the model's template renders."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. Unset: to a text, not to a conversation."""
    return_token_strs: bool = False
    """Report the vocabulary's entry of each token, as the tokenizer spells it."""

    @field_validator("messages", mode="before")
    @classmethod
    def _as_plain_messages(cls, value: object) -> object:
        return plain_messages(value)


class DetokenizeBody(StrictModel):
    """The body of `POST /detokenize`."""

    model: Text | None = None
    """A served name of the model."""
    tokens: UInt32s = Field(default_factory=list)
    """The token ids."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text."""


def _answer(found: generation_pb2.TokenizeResponse, *, with_texts: bool) -> str:
    """Return the body of an answer, made in parts: a thread that writes millions of ids at once would stop others."""
    ids, count = found.token_ids, len(found.token_ids)
    parts = (", ".join(map(str, ids[start : start + _PART])) for start in range(0, count, _PART))
    texts = list(found.token_pieces) if with_texts else None
    head = f'{{"count": {count}, "max_model_len": {found.max_context_len}, "tokens": ['
    return f'{head}{", ".join(parts)}], "token_strs": {json.dumps(texts)}}}'


def add_tokens(app: FastAPI, client: ServiceClient, limits: LimitsSection) -> None:
    """Add the routes."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body, headers = await read_parsed(TokenizeBody, request, limits)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt", body.prompt, "given, or messages, and not both")
        message = generation_pb2.TokenizeRequest(
            model=body.model, add_special_tokens=body.add_special_tokens, return_pieces=body.return_token_strs
        )
        if body.prompt is not None:
            message.text = body.prompt
        else:
            message.chat.CopyFrom(chat_input(body, body.messages or []))
        found = await client.tokenize(message)
        answer = await asyncio.to_thread(_answer, found, with_texts=body.return_token_strs)
        return Response(answer, headers=headers, media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body, headers = await read_parsed(DetokenizeBody, request, limits)
        message = generation_pb2.DetokenizeRequest(
            model=body.model, token_ids=body.tokens, skip_special_tokens=body.skip_special_tokens
        )
        try:
            found = await client.detokenize(message)
        except InvalidRequest as error:
            raise error.renamed(error.field.replace("token_ids", "tokens", 1)) from None
        return JSONResponse({"prompt": found.text}, headers=headers)
