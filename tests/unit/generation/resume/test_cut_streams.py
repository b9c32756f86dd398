"""A stream that breaks off and is resumed equals the undisturbed one, wherever it was cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.load import load
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.core.ids import RequestId
from cluster.core.request import FinishReason
from cluster.generation.events import Event, Finished
from cluster.generation.service import GenerationService
from cluster.generation.text.tokenizer import TextExecutor, Tokenizer
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.fake_drafters import RandomDrafter
from tests.support.fakes.fake_target import FakeTarget
from tests.support.fakes.simulated_time import now, simulate
from tests.support.models.tiny_tokenizer import byte_level
from tests.support.slow import slow_but
from tests.unit.generation.resume.resumed_calls import ReceivedAnswer, collect, new_answers, read_events, resuming

TOKENS = 24
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    "stop strings": {"temperature": 1.0, "stop": 6},
    "held back": {"temperature": 1.0, "held": 6},
    "stop tokens": {"temperature": 1.0, "stop_token": 17},
    "minimal length": {"temperature": 1.0, "stop_token": 17, "min_tokens": 9},
    "several answers": {"temperature": 1.0, "n": 3, "stop": 6},
}


@asynccontextmanager
async def coordinated(directory: Path, *, drafts: bool = True) -> AsyncIterator[tuple[GenerationService, FakeTarget]]:
    """A service over a coordinator whose drafts are accepted and rejected at random."""
    target = FakeTarget(vocabulary_size=282, prefix_cache=True)
    draft = {"method": "ngram" if drafts else "none", "controller": "off", "max_nodes": 4, "max_depth": 4}
    async with Coordinator(target, [RandomDrafter(target)], load({"draft": draft}), Metrics()) as coordinator:
        yield GenerationService(coordinator, Tokenizer.load(byte_level(directory)), LimitsSection()), target


def request_for(values: dict[str, float], plain: ReceivedAnswer | None = None) -> generation_pb2.GenerateRequest:
    """The request of a case. Stop strings are parts of the plain answer; one that is held back never completes."""
    text = "" if plain is None else plain.text
    stop = [text[int(values["stop"]) :][:3]] if "stop" in values and text else []
    stop += [text[int(values["held"]) :][:4] + "~never"] if "held" in values and text else []
    ends = [plain.tokens[int(values["stop_token"])]] if "stop_token" in values and plain is not None else []
    return generation_pb2.GenerateRequest(
        request_id="cut",
        text="hello the world",
        sampling=common_pb2.SamplingParameters(
            temperature=values["temperature"],
            seed=11,
            logprobs=int(values["logprobs"]) if "logprobs" in values else None,
        ),
        stopping=generation_pb2.StoppingCriteria(
            max_tokens=TOKENS,
            ignore_eos=True,
            stop=stop,
            stop_token_ids=ends,
            min_tokens=int(values["min_tokens"]) if "min_tokens" in values else None,
        ),
        n=int(values["n"]) if "n" in values else None,
    )


async def undisturbed(directory: Path, case: str) -> tuple[generation_pb2.GenerateRequest, list[ReceivedAnswer]]:
    """The request of a case, and its answers without drafts and without interruption."""
    async with coordinated(directory, drafts=False) as (service, _):
        first = new_answers(request_for(CASES[case]))
        collect(await read_events(service, request_for(CASES[case])), first)
        request = request_for(CASES[case], first[0])
        answers = new_answers(request)
        collect(await read_events(service, request), answers)
    return request, answers


WAYS = [(case, sent) for case in CASES for sent in ("tokens", "counts")]
"""A request, and whether a resumed call brings the tokens of its answers or their number."""


@pytest.mark.parametrize("case_and_sent", slow_but([*WAYS[::4], *WAYS[3::4]], WAYS), ids="-".join)
async def test_a_stream_resumed_elsewhere_equals_the_undisturbed_one(
    tmp_path: Path, case_and_sent: tuple[str, str]
) -> None:
    case, with_tokens = case_and_sent[0], case_and_sent[1] == "tokens"
    request, plain = await undisturbed(tmp_path, case)
    async with coordinated(tmp_path) as (service, target), coordinated(tmp_path) as (other, _):
        total = len(await read_events(service, request))
        for most in range(1, total):
            answers = new_answers(request)
            collect(await read_events(service, request, most), answers)
            resumed = await read_events(other, resuming(request, answers, with_tokens=with_tokens))
            collect(resumed, answers)
            assert [answer.content for answer in answers] == [answer.content for answer in plain], most
        assert 0 < target.accepted < target.drafted


async def test_a_stream_resumed_where_it_ran_takes_its_tokens_from_memory(tmp_path: Path) -> None:
    request, plain = await undisturbed(tmp_path, "sampled")
    async with coordinated(tmp_path, drafts=False) as (service, target):
        answers = new_answers(request)
        collect(await read_events(service, request, 15), answers)
        steps = len(target.batches)
        resumed = await read_events(service, resuming(request, answers, with_tokens=False))
        assert len(target.batches) - steps <= TOKENS - len(answers[0].tokens) + 1
    collect(resumed, answers)
    assert answers[0].content == plain[0].content
    assert answers[0].end is not None
    assert answers[0].end.usage.resumed_tokens == 14
    assert answers[0].end.usage.target_steps == TOKENS


async def test_a_resumed_call_ends_the_call_that_still_runs(tmp_path: Path) -> None:
    request, plain = await undisturbed(tmp_path, "sampled")
    async with coordinated(tmp_path) as (service, _):
        stream = service.generate(request)
        answers = new_answers(request)
        collect([await anext(stream), await anext(stream)], answers)

        async def read_on() -> str:
            end = [event async for event in stream][-1]
            assert isinstance(end, Finished)
            return end.reason.value

        earlier = asyncio.create_task(read_on())
        resumed = await read_events(service, resuming(request, answers, with_tokens=False))
        assert await earlier == "abort"
    collect(resumed, answers)
    assert answers[0].content == plain[0].content


async def at_once(_: TextExecutor, __: int, function: Callable[..., Any], *values: object) -> Any:
    return function(*values)


@pytest.mark.parametrize("gap", [0.0, 0.02, 0.03])
def test_of_two_calls_that_resume_a_third_one_the_later_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: float
) -> None:
    """Whatever the phases in which they wait for the end of the third one, which takes 60 ms of simulated time."""
    monkeypatch.setattr(TextExecutor, "run", at_once)  # simulated time does not wait for threads

    async def scenario() -> None:
        request, plain = await undisturbed(tmp_path, "sampled")
        async with coordinated(tmp_path, drafts=False) as (service, target):
            target.step_delay = 0.004
            stream = service.generate(request)
            answers = new_answers(request)
            collect([await anext(stream), await anext(stream)], answers)

            async def read_on() -> Event:
                return [event async for event in stream][-1]

            engine, begun = service._engine, now()
            abort = engine.abort
            monkeypatch.setattr(engine, "abort", lambda name: now() > begun + 0.06 and abort(name))
            earlier = asyncio.create_task(read_on())
            resumed = resuming(request, answers, with_tokens=True)
            first = asyncio.create_task(read_events(service, resumed))
            await asyncio.sleep(gap)
            second = asyncio.create_task(read_events(service, resumed))
            await asyncio.sleep(0.01)
            of_another_client = resuming(request, answers, with_tokens=True)
            of_another_client.client = "other"
            third = asyncio.create_task(read_events(service, of_another_client))
            await asyncio.sleep(begun + 0.06 - now())
            assert abort(RequestId(request.request_id))
            end = await earlier
            assert isinstance(end, Finished) and end.reason is FinishReason.ABORT
            for goes_on in (await second, await third):
                whole = deepcopy(answers)
                collect(goes_on, whole)
                assert whole[0].content == plain[0].content
            with pytest.raises(InvalidRequest, match=r"request_id: 'cut' is refused; .* a later one goes on"):
                await first

    simulate(scenario())


async def test_the_counts_of_the_first_call_are_part_of_the_usage(tmp_path: Path) -> None:
    request, _ = await undisturbed(tmp_path, "sampled")
    async with coordinated(tmp_path) as (service, _), coordinated(tmp_path) as (other, _):
        answers = new_answers(request)
        collect(await read_events(service, request, 6), answers)
        collect(await read_events(other, resuming(request, answers, with_tokens=True)), answers)
    (answer,) = answers
    assert answer.end is not None
    usage = answer.end.usage
    counted = (usage.drafted_tokens, usage.accepted_tokens, usage.target_steps)
    assert counted == (answer.drafted, answer.accepted, answer.steps)


async def test_finished_answers_are_not_repeated_and_none_is_generated_again(tmp_path: Path) -> None:
    request, _ = await undisturbed(tmp_path, "several answers")
    async with coordinated(tmp_path) as (service, target):
        answers = new_answers(request)
        collect(await read_events(service, request), answers)
        steps = len(target.batches)
        events = await read_events(service, resuming(request, answers, with_tokens=True))
        assert [type(event).__name__ for event in events] == ["Started"]
        for answer in answers:
            answer.end = None
        events = await read_events(service, resuming(request, answers, with_tokens=True))
        assert [type(event).__name__ for event in events] == ["Started"] + ["Finished"] * 3
        assert len(target.batches) == steps
