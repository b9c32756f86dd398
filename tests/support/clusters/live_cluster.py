"""Sends requests to a running server over both APIs, and computes the expected answers with `transformers` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.core.request import SamplingParameters
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.models.plain_generation import write_alone

TIMEOUT_SECONDS = 600.0
"""Seconds. Longer than any answer takes, so that a hang becomes a failure."""


@dataclass(frozen=True)
class RequestCase:
    """One request, the same over either API. Its answer has exactly `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_draft_tokens: int | None = None
    """0 selects plain decoding."""

    def message(self) -> generation_pb2.GenerateRequest:
        """The gRPC request."""
        return generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=self.prompt),
            sampling=common_pb2.SamplingParameters(temperature=self.temperature, top_p=self.top_p, seed=self.seed),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.max_tokens, ignore_eos=True),
            max_draft_tokens=self.max_draft_tokens,
        )


@dataclass(frozen=True)
class Server:
    """The addresses of a running server, and the name of its model."""

    grpc_address: str
    http_url: str
    model: str = "smollm2-135m-instruct"


@dataclass(frozen=True)
class ClientAnswer:
    """An answer as a client receives it."""

    tokens: tuple[int, ...]
    drafted: int
    """Drafted tokens that the target verified."""
    accepted: int
    """Drafted tokens that the target accepted."""


async def answer_grpc(server: Server, case: RequestCase) -> ClientAnswer:
    """The answer over gRPC."""
    tokens: list[int] = []
    accepted = 0
    usage = generation_pb2.Usage()
    async with GenerationClient(fixed_address(server.grpc_address)) as client:
        async for response in client.generate(case.message(), TIMEOUT_SECONDS):
            tokens.extend(response.delta.token_ids)
            accepted += response.delta.accepted_draft_tokens
            usage.MergeFrom(response.finished.usage)
    assert accepted == usage.accepted_draft_tokens
    return ClientAnswer(tuple(tokens), usage.drafted_tokens, accepted)


async def answer_http(server: Server, case: RequestCase) -> ClientAnswer:
    """The answer over HTTP, streamed to the `openai` client."""
    extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    if case.max_draft_tokens is not None:
        extra["max_draft_tokens"] = case.max_draft_tokens
    tokens: list[int] = []
    accepted = drafted = 0
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=server.model,
            prompt=list(case.prompt),
            max_tokens=case.max_tokens,
            temperature=case.temperature,
            top_p=case.top_p,
            seed=case.seed,
            stream=True,
            stream_options={"include_usage": True},
            timeout=TIMEOUT_SECONDS,
            extra_body=extra,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                tokens.extend((choice.model_extra or {}).get("token_ids") or ())
                accepted += (choice.model_extra or {}).get("accepted_draft_tokens") or 0
            if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                details = chunk.usage.completion_tokens_details
                assert details.accepted_prediction_tokens == accepted
                drafted = accepted + (details.rejected_prediction_tokens or 0)
    return ClientAnswer(tuple(tokens), drafted, accepted)


async def tokens_grpc(server: Server, case: RequestCase) -> tuple[int, ...]:
    """The answer's tokens over gRPC."""
    return (await answer_grpc(server, case)).tokens


async def tokens_http(server: Server, case: RequestCase) -> tuple[int, ...]:
    """The answer's tokens over HTTP."""
    return (await answer_http(server, case)).tokens


async def answer_all(
    server: Server, cases: Sequence[RequestCase], concurrency: int
) -> list[tuple[ClientAnswer, ClientAnswer]]:
    """Every answer over gRPC and over HTTP, with `concurrency` requests in flight."""
    slots = asyncio.Semaphore(concurrency)

    async def over_both(case: RequestCase) -> tuple[ClientAnswer, ClientAnswer]:
        async with slots:
            over_grpc = await answer_grpc(server, case)
        async with slots:
            over_http = await answer_http(server, case)
        return over_grpc, over_http

    return list(await asyncio.gather(*map(over_both, cases)))


class Reference:
    """The reference: `transformers` alone, with only the sampling noise of this project."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def chat(self, text: str) -> tuple[int, ...]:
        """The tokens of a chat message, with the model's own chat template."""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        return tuple(rendered)

    def plain(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, without the chat template."""
        return tuple(self.tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` greedy tokens by `generate` of `transformers`."""
        output = self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(output[0, len(prompt) :].tolist())

    def sampled(self, case: RequestCase) -> tuple[int, ...]:
        """The tokens of a sampled request, one cached forward pass per token."""
        sampling = SamplingParameters(temperature=case.temperature, top_p=case.top_p, seed=case.seed)
        return write_alone(self._model, case.prompt, sampling, case.max_tokens)
