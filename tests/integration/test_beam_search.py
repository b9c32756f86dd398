"""Several answers to one prompt, over both APIs. Beams equal those of `transformers`, samples equal those of single
requests, and the prompt is stored once.

The model is tiny and random, so the tests cover the cluster and not the quality of answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.clusters.live_cluster import RequestCase, Server, tokens_grpc
from tests.support.deadline import deadline
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 120.0
"""Seconds. Longer than any test takes, so that a hang becomes a failure."""
PROMPT = tuple(range(40, 60))
MAX_TOKENS = 12
EARLY_STOPPING = {
    False: generation_pb2.EARLY_STOPPING_NO,
    True: generation_pb2.EARLY_STOPPING_YES,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}
Answers = list[tuple[int, ...]]


@dataclass(frozen=True)
class Search:
    """A beam search, the same over either API and for `transformers`."""

    width: int
    n: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stops: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer without unknown tokens. Token 2 ends an answer."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=1024), sharpness=2.0)
    return tiny_tokenizer.byte_level(directory)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stops(model: Any) -> tuple[int, ...]:
    """Tokens that appear in beams at different depths, so that answers of different lengths compete."""
    best = by_transformers(model, Search(4, 4))
    return tuple({answer[depth] for answer, depth in zip(best, (3, 5, 7, 9), strict=True)})


def configure(directory: Path, **overrides: object) -> Configuration:
    values = {
        "target.path": str(directory),
        "target.device": "cpu",
        "target.kv.pool_bytes": 1 << 20,
        "draft.method": "ngram",
        "draft.timeout_seconds": 5.0,
        "server.http_port": 0,
        "server.grpc_port": 0,
    }
    return load_configuration({}, values | {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.fixture
async def server(directory: Path) -> AsyncIterator[Server]:
    async with deadline(TIMEOUT_SECONDS), LocalCluster(configure(directory), http=True) as cluster:
        yield Server(cluster.grpc_address, cluster.http_url)


@torch.inference_mode()
def by_transformers(model: Any, search: Search, prompt: Sequence[int] = PROMPT) -> Answers:
    """The answers of `transformers`, cut after their stop token."""
    ends = (2, *search.stops)
    sequences = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        num_beams=search.width,
        num_return_sequences=search.n,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(ends),
        pad_token_id=0,
        do_sample=False,
    )
    answers = [sequence[len(prompt) :] for sequence in sequences.tolist()]
    lengths = [next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer)) for answer in answers]
    return [tuple(answer[:length]) for answer, length in zip(answers, lengths, strict=True)]


async def over_grpc(server: Server, message: generation_pb2.GenerateRequest) -> Answers:
    """The tokens of each answer."""

    async def resolve() -> str:
        return server.grpc_address

    answers: dict[int, tuple[int, ...]] = defaultdict(tuple)
    ended: list[int] = []
    async with GenerationClient(resolve) as client:
        async for response in client.generate(message, TIMEOUT_SECONDS):
            answers[response.index] += tuple(response.delta.token_ids)
            if response.HasField("finished"):
                ended.append(response.index)
    assert sorted(ended) == sorted(answers)
    return [answers[index] for index in sorted(answers)]


async def beams_over_grpc(server: Server, search: Search) -> Answers:
    return await over_grpc(
        server,
        generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=PROMPT),
            stopping=generation_pb2.StoppingCriteria(max_tokens=MAX_TOKENS, stop_token_ids=search.stops),
            n=search.n,
            best_of=search.width,
            beam_search=generation_pb2.BeamSearch(
                length_penalty=search.length_penalty, early_stopping=EARLY_STOPPING[search.early_stopping]
            ),
        ),
    )


async def beams_over_http(server: Server, search: Search) -> Answers:
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        completion = await client.completions.create(
            model="tiny",
            prompt=list(PROMPT),
            max_tokens=MAX_TOKENS,
            temperature=0,
            n=search.n,
            best_of=search.width,
            extra_body={
                "use_beam_search": True,
                "length_penalty": search.length_penalty,
                "early_stopping": search.early_stopping,
                "stop_token_ids": list(search.stops),
                "return_token_ids": True,
            },
        )
    assert [choice.index for choice in completion.choices] == list(range(search.n))
    return [tuple((choice.model_extra or {})["token_ids"]) for choice in completion.choices]


async def test_beams_are_those_of_transformers_over_both_apis(
    server: Server, model: Any, stops: tuple[int, ...]
) -> None:
    searches = [
        Search(2, 1),
        Search(4, 4),
        Search(4, 2, length_penalty=0.0, stops=stops[:1]),
        Search(5, 5, length_penalty=2.0, early_stopping=True, stops=stops[:2]),
        Search(3, 3, length_penalty=-1.0, early_stopping="never", stops=stops),
        Search(8, 8, length_penalty=0.6, early_stopping="never", stops=stops[:1]),
    ]
    expected = [by_transformers(model, search) for search in searches]
    assert len({len(answer) for answers in expected for answer in answers}) > 3
    for api in (beams_over_grpc, beams_over_http):
        assert await asyncio.gather(*(api(server, search) for search in searches)) == expected


async def test_beams_are_the_same_beside_other_requests_and_with_too_little_memory(directory: Path, model: Any) -> None:
    """Sampled requests with drafts run beside them. Together they need too many blocks, and some are preempted."""
    search = Search(6, 3)
    requests = [RequestCase(tuple(range(3 + seed, 243 + seed)), 80, temperature=1.0, seed=seed) for seed in range(14)]
    configuration = configure(directory, scheduler__max_step_tokens=64)
    async with deadline(TIMEOUT_SECONDS), LocalCluster(configuration, http=True) as cluster:
        server = Server(cluster.grpc_address, cluster.http_url)
        others = [asyncio.create_task(tokens_grpc(server, asked)) for asked in requests]
        beams = await asyncio.gather(*(beams_over_grpc(server, search) for _ in range(3)))
        crowded = await asyncio.gather(*others)
        assert beams == [by_transformers(model, search)] * 3
        async with httpx.AsyncClient(base_url=server.http_url) as http:
            assert await metric(http, "vllm:num_preemptions_total") > 0
            for _ in range(500):  # releases are sent in the background
                if await metric(http, "vllm:kv_cache_usage_perc") == 0.0:
                    break
                await asyncio.sleep(0.01)
            assert await metric(http, "vllm:kv_cache_usage_perc") == 0.0
        assert [await tokens_grpc(server, asked) for asked in requests[:4]] == crowded[:4]


async def test_n_samples_are_those_of_single_requests_with_the_seeds_that_follow(server: Server) -> None:
    message = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingParameters(temperature=0.9, seed=2**64 - 2),
        stopping=generation_pb2.StoppingCriteria(max_tokens=30, ignore_eos=True),
        n=4,
    )
    together = await over_grpc(server, message)
    singles = [
        await tokens_grpc(server, RequestCase(PROMPT, 30, temperature=0.9, seed=seed))
        for seed in (2**64 - 2, 2**64 - 1, 0, 1)
    ]
    assert together == singles
    assert len(set(together)) == 4
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt=list(PROMPT),
            max_tokens=30,
            temperature=0.9,
            seed=0,
            n=2,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        streamed: dict[int, tuple[int, ...]] = defaultdict(tuple)
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += tuple((choice.model_extra or {}).get("token_ids") or ())
    assert [streamed[0], streamed[1]] == singles[2:]


async def test_the_best_of_many_samples_are_the_most_probable_ones(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:

        async def ask(**values: Any) -> Any:
            return await client.completions.create(
                model="tiny",
                prompt=list(PROMPT),
                max_tokens=10,
                seed=5,
                logprobs=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                **values,
            )

        def means(completion: Any) -> list[tuple[float, list[int]]]:
            chosen = [
                (choice.logprobs.token_logprobs, choice.model_extra["token_ids"]) for choice in completion.choices
            ]
            return [(sum(values) / len(values), tokens) for values, tokens in chosen]

        best = means(await ask(n=2, best_of=6))
        assert best == sorted(means(await ask(n=6)), reverse=True)[:2]


async def test_samples_share_the_blocks_of_their_prompt(server: Server) -> None:
    prompt = tuple(index % 280 + 10 for index in range(900))  # 57 blocks; the pool of 170 has room for two copies
    message = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(seed=3),
        stopping=generation_pb2.StoppingCriteria(max_tokens=40, ignore_eos=True),
        n=5,
    )
    fullest = 0.0
    async with httpx.AsyncClient(base_url=server.http_url) as http:
        task = asyncio.create_task(over_grpc(server, message))
        while not task.done():
            fullest = max(fullest, await metric(http, "vllm:kv_cache_usage_perc"))
        assert [len(answer) for answer in await task] == [40] * 5
        assert 57 / 170 < fullest < 100 / 170
        assert await metric(http, "vllm:num_preemptions_total") == 0
        assert await metric(http, "pilotfish:forked_tokens_total") >= 4 * 890
        assert await metric(http, "vllm:kv_cache_usage_perc") == 0.0


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """The value of a metric, summed over its labels."""
    text = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)
