"""Both APIs of a scripted translator: its engine answers each French sentence with an English one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fastapi import FastAPI

from cluster.core.config.sections import LimitsSection
from cluster.generation.events import Event
from cluster.generation.service import GenerationService
from cluster.generation.servicer import GenerationServicer
from cluster.generation.text.tokenizer import Tokenizer
from cluster.ingress.http import create_app
from pilotfish.v1 import generation_pb2
from tests.support.fakes.fake_engine import InProcessClient, ScriptedEngine
from tests.support.translation.tiny_marian import ENGLISH, FRENCH, marian_tokenizer

PADDING, END = 95, 0
SOURCE_BOUND = 48


@dataclass(frozen=True)
class Translator:
    """A generation service over a scripted encoder-decoder engine, and an HTTP API in front of it."""

    service: GenerationService
    engine: ScriptedEngine
    tokenizer: Tokenizer
    app: FastAPI
    http: httpx.AsyncClient

    async def events(self, request: generation_pb2.GenerateRequest) -> list[Event]:
        async with aclosing(self.service.generate(request)) as events:
            return [event async for event in events]


@asynccontextmanager
async def translator(directory: Path, *, block: int = 3, template: str | None = None) -> AsyncIterator[Translator]:
    """Serve the script: `ENGLISH[i]` for `FRENCH[i]`."""
    marian_tokenizer(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(directory)
    answers = {
        tokenizer.encode(french): (*tokenizer.encode_answer(english), END)
        for french, english in zip(FRENCH, ENGLISH, strict=True)
    }
    engine = ScriptedEngine(lambda request: answers[request.source], block)
    engine.decoder_start, engine.max_source_len, engine.eos_token_ids = (PADDING,), SOURCE_BOUND, (END,)
    service = GenerationService(engine, tokenizer, LimitsSection())
    app = create_app(InProcessClient(GenerationServicer(service), lambda: True), LimitsSection())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pilotfish") as http:
        yield Translator(service, engine, tokenizer, app, http)
