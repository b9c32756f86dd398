"""An OpenAI-compatible server as a contestant: streamed chat completions over HTTP."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from cluster.core.errors import WorkerUnavailable
from deploy.bench.contestants.answers import Arrival, BenchAnswer, BenchPass, BenchPrompt, PassRequest, answer_pass
from deploy.draft_origins import summed
from deploy.network.https_client import JSON_HEADERS, lines_of, refusal_hint, to_json, why_silent

_PATH = "/v1/chat/completions"
_LONGEST_EVENT = 80
"""Most characters of an event that an error shows."""


class EndpointContestant:
    """Measures a server by its streamed answers. It reports τ only where the server counts target steps."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, predicts: bool = False) -> None:
        """The base address of `client` is the server's.

        With `predicts`, requests have the `prediction` (OpenAI's parameter) of prompts that have one.
        """
        self._client = client
        self._model = model
        self._predicts = predicts

    async def answer(self, request: PassRequest) -> BenchPass:
        return await answer_pass(request, self._answer)

    async def _answer(self, request: PassRequest, prompt: BenchPrompt, seed: int) -> BenchAnswer:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._predicts and prompt.prediction:
            body["prediction"] = {"type": "content", "content": prompt.prediction}
        read = StreamReader()
        try:
            async with self._client.stream("POST", _PATH, content=to_json(body), headers=JSON_HEADERS) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")[:500]
                    hint = refusal_hint(response.status_code)
                    raise WorkerUnavailable(f"{response.request.url} answered {response.status_code}: {text}{hint}")
                async for line in lines_of(response):
                    read.line(line)
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"{self._client.base_url}: {why_silent(error)}") from error
        return read.answer(counts_drafts="prediction" not in body)


class StreamReader:
    """Reads one streamed chat completion or completion, and times its chunks."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._seconds: list[float] = []
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._is_lossless = True
        self._origins: list[dict[str, int]] = []

    def line(self, line: str) -> None:
        """Read one line of the event stream. Raises `WorkerUnavailable` for an error, and for what is no event."""
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            return
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise WorkerUnavailable(f"the server sent no event, but {payload[:_LONGEST_EVENT]!r}")
        if event.get("error") is not None:
            error = event["error"]
            reason = error.get("message", error) if isinstance(error, dict) else error
            raise WorkerUnavailable(f"the server ended the answer with an error: {reason}")
        self._usage = event.get("usage") or self._usage
        self._is_lossless &= event.get("lossless", True) is not False
        for choice in event.get("choices", ()):
            self._origins.append((choice.get("receipt") or {}).get("accepted_by_origin") or {})
            delta = choice.get("delta", {})
            text = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
            if text:
                self._seconds.append(time.perf_counter() - self._begun)
                self._text.append(text)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 where the server reports no usage."""
        return int(self._usage.get("prompt_tokens") or 0)

    def answer(self, *, counts_drafts: bool = True) -> BenchAnswer:
        """The whole answer. The tokens of the usage are spread over the chunks, the remainder over the last ones.

        Without `counts_drafts`, the usage counts a prediction of the client, and drafts are unknown.
        """
        chunks = len(self._seconds)
        tokens = int(self._usage.get("completion_tokens", chunks))
        least, more = divmod(tokens, chunks) if chunks else (0, 0)
        arrivals = [Arrival(seconds, least + (index >= chunks - more)) for index, seconds in enumerate(self._seconds)]
        details = (self._usage.get("completion_tokens_details") or {}) if counts_drafts else {}
        accepted, rejected = (details.get(f"{kind}_prediction_tokens") for kind in ("accepted", "rejected"))
        drafted = int(accepted or 0) + int(rejected or 0)
        # Every target step adds one token of its own to the accepted ones.
        steps = 0 if accepted is None else tokens - int(accepted)
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return BenchAnswer(
            (),
            tuple(arrivals),
            tokens,
            drafted,
            steps,
            self._is_lossless,
            "".join(self._text),
            self.prompt_tokens,
            int(cached or 0),
            summed(self._origins),
        )
