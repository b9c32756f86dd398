"""The HTTP API over a scripted engine, without a socket, and readers of its responses."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from cluster.core.config.sections import LimitsSection
from cluster.generation.servicer import GenerationServicer
from cluster.generation.text.tokenizer import Tokenizer
from cluster.ingress.http import create_app
from tests.support.fakes.fake_engine import InProcessClient, fake_service

if TYPE_CHECKING:
    import openai

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
LIMITS = LimitsSection(max_body_bytes=2048, max_prompts=4)


class HttpApi:
    """An HTTP client of an application over a scripted engine."""

    def __init__(
        self,
        directory: Path,
        text: str = "hello the world",
        limits: LimitsSection = LIMITS,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        generation, self.engine, self.tokenizer = fake_service(directory, text, limits=limits, tokenizer=tokenizer)
        self.client = InProcessClient(GenerationServicer(generation), lambda: self.engine.ready)
        self._limits = limits

    @cached_property
    def http(self) -> httpx.AsyncClient:
        """Calls the application. A test that needs only the service makes none."""
        transport = httpx.ASGITransport(create_app(self.client, self._limits), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://pilotfish")

    async def post(self, path: str, **values: Any) -> httpx.Response:
        return await self.http.post(path, json=values)

    async def chat(self, **values: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": HI, **values})

    async def complete(self, **values: Any) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "hi", **values})


def api_that_writes(directory: Path, text: str) -> HttpApi:
    """An application whose engine has room for long prompts."""
    api = HttpApi(directory, text)
    api.engine.context = 1024
    return api


def openai_client(api: HttpApi) -> openai.AsyncOpenAI:
    """OpenAI's own client of the application."""
    import openai

    return openai.AsyncOpenAI(base_url="http://pilotfish/v1", api_key="none", http_client=api.http, max_retries=0)


def prompt_of(api: HttpApi) -> str:
    """The prompt of the last request, as the engine got it."""
    return api.tokenizer.decode(api.engine.requests[-1].prompt, skip_special_tokens=False)


def chunks(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (data_of(done), rest) == ("[DONE]", "")
    return [json.loads(data_of(event)) for event in events]


def data_of(event: str) -> str:
    """The data of an event. Every event has an id."""
    event_id, _, data = event.partition("\n")
    assert event_id.startswith("id: ")
    assert data.startswith("data: ")
    return data.removeprefix("data: ")


def error_of(response: httpx.Response) -> Any:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
