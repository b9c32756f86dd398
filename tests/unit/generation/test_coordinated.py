"""The generation service over the real coordinator. The drafter changes nothing that a client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.load import load
from cluster.core.config.sections import LimitsSection
from cluster.core.request import FinishReason
from cluster.generation.events import Delta, Event, Finished, Started
from cluster.generation.service import GenerationService
from cluster.generation.text.tokenizer import Tokenizer
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.fake_cluster import until, value_of
from tests.support.fakes.fake_drafters import FakeDrafter, PerfectDrafter, RandomDrafter, WrongDrafter
from tests.support.fakes.fake_target import FakeTarget
from tests.support.models.tiny_tokenizer import byte_level

REASONS = ("stop", "length", "abort")
DRAFTERS = [WrongDrafter, PerfectDrafter, RandomDrafter]
Read = tuple[str, list[int], Finished]


@asynccontextmanager
async def coordinated(
    directory: Path, drafter: type[FakeDrafter], metrics: Metrics | None = None
) -> AsyncIterator[tuple[GenerationService, FakeTarget]]:
    target = FakeTarget(vocabulary_size=282)
    configuration = load({"draft": {"method": "ngram", "controller": "off"}})
    async with Coordinator(target, [drafter(target)], configuration, metrics or Metrics()) as coordinator:
        yield GenerationService(coordinator, Tokenizer.load(byte_level(directory)), LimitsSection()), target


async def read(generation: GenerationService, *stops: str, seed: int = 5) -> Read:
    request = generation_pb2.GenerateRequest(
        text="hello",
        sampling=common_pb2.SamplingParameters(seed=seed),
        stopping=generation_pb2.StoppingCriteria(max_tokens=60, stop=stops, ignore_eos=True),
    )
    async with aclosing(generation.generate(request)) as stream:
        events: list[Event] = [event async for event in stream]
    deltas = [event for event in events if isinstance(event, Delta)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.tokens], finished


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_text_and_stop_do_not_depend_on_the_drafter(tmp_path: Path, drafter: type[FakeDrafter]) -> None:
    async with coordinated(tmp_path, WrongDrafter) as (plain, _):
        text, tokens, finished = await read(plain)
        assert (len(tokens), finished.reason) == (60, FinishReason.LENGTH)
        stop = text[len(text) // 2 :][:3]
        cut = await read(plain, stop)
    async with coordinated(tmp_path, drafter) as (generation, _):
        assert (await read(generation))[:2] == (text, tokens)
        assert (await read(generation, stop))[:2] == cut[:2]
        assert cut[0] == text[: text.index(stop)]


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_the_usage_of_an_answer_ends_at_its_stop_string_and_the_target_is_freed(
    tmp_path: Path, drafter: type[FakeDrafter]
) -> None:
    async with coordinated(tmp_path, drafter) as (generation, target):
        text, _, _ = await read(generation)
        _, tokens, finished = await read(generation, text[len(text) // 2 :][:3])
        usage = finished.usage
        assert (finished.reason, usage.completion_tokens) == (FinishReason.STOP, len(tokens))
        assert 0 <= usage.accepted_tokens <= usage.drafted_tokens
        assert (usage.accepted_tokens > 0) is (drafter is not WrongDrafter)
        async with asyncio.timeout(5):
            await until(lambda: not target.stored)


async def test_a_stop_string_counts_as_stopped_and_a_closed_stream_as_aborted(
    tmp_path: Path,
) -> None:
    metrics = Metrics()
    async with coordinated(tmp_path, PerfectDrafter, metrics) as (generation, _):
        text, _, _ = await read(generation)
        await read(generation, text[len(text) // 2 :][:3])
        request = generation_pb2.GenerateRequest(text="hello", sampling=common_pb2.SamplingParameters(seed=5))
        async with aclosing(generation.generate(request)) as stream:
            await anext(stream)
        assert [value_of(metrics, "vllm:request_success_total", finished_reason=reason) for reason in REASONS] == [
            1,
            1,
            1,
        ]


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_several_answers_equal_those_of_single_requests(tmp_path: Path, drafter: type[FakeDrafter]) -> None:
    async with coordinated(tmp_path, WrongDrafter) as (plain, _):
        singles = [await read(plain, "a", "b", seed=5 + index) for index in range(4)]
    assert len({len(tokens) for _, tokens, _ in singles}) > 1
    async with coordinated(tmp_path, drafter) as (generation, target):
        request = generation_pb2.GenerateRequest(
            text="hello",
            sampling=common_pb2.SamplingParameters(seed=5),
            stopping=generation_pb2.StoppingCriteria(max_tokens=60, stop=["a", "b"], ignore_eos=True),
            n=4,
        )
        async with aclosing(generation.generate(request)) as stream:
            events = [event async for event in stream if not isinstance(event, Started)]
        for index, (text, tokens, finished) in enumerate(singles):
            deltas = [event for event in events if isinstance(event, Delta) and event.index == index]
            ends = [event for event in events if isinstance(event, Finished) and event.index == index]
            assert "".join(delta.text for delta in deltas) == text
            assert [token for delta in deltas for token in delta.tokens] == tokens
            assert [(end.reason, end.stop_string) for end in ends] == [(finished.reason, finished.stop_string)]
        async with asyncio.timeout(5):
            await until(lambda: not target.stored)
