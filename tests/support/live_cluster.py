"""Asking a running server through its two doors, and what `transformers` alone would have written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.core.request import SamplingParameters
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.plain_generation import write_alone


@dataclass(frozen=True)
class Ask:
    """One request, the same through either door."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Server:
    """Where a running server listens."""

    grpc_address: str
    http_url: str


@dataclass(frozen=True)
class Answer:
    """What came back, and how many of its tokens a drafter wrote first."""

    tokens: tuple[int, ...]
    accepted: int


async def ask_grpc(server: Server, asked: Ask) -> tuple[int, ...]:
    """The answer's tokens over gRPC."""
    return (await answer_grpc(server, asked)).tokens


async def answer_grpc(server: Server, asked: Ask) -> Answer:
    """The answer over gRPC."""

    async def resolve() -> str:
        return server.grpc_address

    client = GenerationClient(resolve)
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=asked.prompt),
        sampling=common_pb2.SamplingParameters(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed),
        stopping=generation_pb2.StoppingCriteria(max_tokens=asked.max_tokens, ignore_eos=True),
    )
    tokens: list[int] = []
    accepted = 0
    try:
        async for response in client.generate(request, 600.0):
            tokens.extend(response.delta.token_ids)
            accepted += response.delta.accepted_draft_tokens
    finally:
        await client.close()
    return Answer(tuple(tokens), accepted)


async def ask_http(server: Server, asked: Ask) -> tuple[int, ...]:
    """The answer's tokens over HTTP, streamed to the `openai` client."""
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="smollm2-135m-instruct",
            prompt=list(asked.prompt),
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            stream=True,
            timeout=600.0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        tokens: list[int] = []
        async for chunk in stream:
            for choice in chunk.choices:
                tokens.extend((choice.model_extra or {}).get("token_ids") or ())
    return tuple(tokens)


async def ask_all(server: Server, asks: Sequence[Ask], at_once: int) -> list[tuple[int, ...]]:
    """All answers, `at_once` in flight, every other one through each door."""
    places = asyncio.Semaphore(at_once)

    async def one(index: int, asked: Ask) -> tuple[int, ...]:
        async with places:
            return await (ask_http if index % 2 else ask_grpc)(server, asked)

    return list(await asyncio.gather(*(one(index, asked) for index, asked in enumerate(asks))))


class Reference:
    """The model by itself, without anything of ours but the definition of a draw."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def chat(self, text: str) -> tuple[int, ...]:
        """The prompt's tokens after the model's own template."""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        return tuple(rendered)

    def plain(self, text: str) -> tuple[int, ...]:
        """The prompt's tokens as they stand."""
        return tuple(self.tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """`generate` of `transformers`."""
        output = self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(output[0, len(prompt) :].tolist())

    def sampled(self, asked: Ask) -> tuple[int, ...]:
        """One token after another from the model's own cached forward pass."""
        sampling = SamplingParameters(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed)
        return write_alone(self._model, asked.prompt, sampling, asked.max_tokens)
