"""The generation service: from a request to events, for any commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    Overloaded,
    TargetUnavailable,
)
from cluster.core.request import Commit, FinishReason, GenerationRequest
from cluster.generation.events import Delta, Event, Finished, Started
from cluster.generation.service import GenerationService
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.fake_engine import CONTEXT, MODEL, ScriptedEngine, fake_service

Request = generation_pb2.GenerateRequest
Stopping = generation_pb2.StoppingCriteria


async def events_of(generation: GenerationService, request: Request, seconds: float | None = None) -> list[Event]:
    async with aclosing(generation.generate(request, seconds)) as events:
        return [event async for event in events]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


async def test_an_answer_has_a_start_deltas_and_an_end(tmp_path: Path) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    events = await events_of(
        generation, Request(text="hi", request_id="r", sampling=common_pb2.SamplingParameters(seed=7))
    )
    assert events[0] == Started(engine.requests[0].request_id, MODEL, 7, len(tokenizer.encode("hi")))
    assert text_of(events) == "hello the world"
    assert tokens_of(events) == [*tokenizer.encode("hello the world"), 2]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stop_token) == (FinishReason.STOP, 2)
    assert finished.usage.completion_tokens == len(tokens_of(events))


async def test_the_text_of_a_stop_token_is_left_out(tmp_path: Path) -> None:
    generation, _, tokenizer = fake_service(tmp_path, "hello world")
    first, second, *_ = tokenizer.encode("hello world")
    events = await events_of(generation, Request(text="hi", stopping=Stopping(stop_token_ids=[second])))
    assert text_of(events) == tokenizer.decode([first])
    assert tokens_of(events) == [first, second]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 20])
async def test_the_text_does_not_depend_on_how_tokens_are_committed(tmp_path: Path, block: int) -> None:
    generation, _, _ = fake_service(tmp_path, "hello 🐟 世界 END the world", block=block)
    assert text_of(await events_of(generation, Request(text="hi"))) == "hello 🐟 世界 END the world"
    events = await events_of(generation, Request(text="hi", stopping=Stopping(stop=["界 EN", "world"])))
    assert text_of(events) == "hello 🐟 世"
    assert isinstance(events[-1], Finished)
    assert events[-1].stop_string == "界 EN"


@pytest.mark.parametrize("block", [1, 4, 20])
async def test_a_stop_string_cuts_the_tokens_after_it_and_frees_the_answer(tmp_path: Path, block: int) -> None:
    generation, engine, tokenizer = fake_service(tmp_path, "hello the world and more fish", block=block)
    events = await events_of(generation, Request(text="hi", request_id="r", stopping=Stopping(stop=["wor"])))
    kept = tokens_of(events)
    assert text_of(events) == "hello the "
    assert "wor" in tokenizer.decode(kept)
    assert "wor" not in tokenizer.decode(kept[:-1])
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.STOP, len(kept))
    assert engine.sent == len(kept)
    assert engine.freed.get_nowait() == "r"


@pytest.mark.parametrize("block", [1, 4, 20])
async def test_a_stop_string_within_the_minimal_length_does_not_end_the_answer(tmp_path: Path, block: int) -> None:
    generation, _, tokenizer = fake_service(tmp_path, "hello END and END of", block=block)
    first = next(n for n in range(99) if "END" in tokenizer.decode(tokenizer.encode("hello END and END of")[:n]))
    for min_tokens, text in ((first - 1, "hello "), (first, "hello END and ")):
        stopping = Stopping(stop=["END"], min_tokens=min_tokens)
        events = await events_of(generation, Request(text="hi", stopping=stopping))
        assert (text_of(events), len(tokens_of(events)) > min_tokens) == (text, True)


async def test_a_prediction_is_tokenized_without_special_tokens(tmp_path: Path) -> None:
    limits = LimitsSection(max_prediction_tokens=8)
    generation, engine, tokenizer = fake_service(tmp_path, limits=limits)
    await events_of(generation, Request(text="hi", prediction_text="hello world"))
    await events_of(generation, Request(text="hi", prediction_token_ids=common_pb2.TokenIds(ids=[5, 6])))
    await events_of(generation, Request(text="hi"))
    expected = [tokenizer.encode("hello world", add_special_tokens=False), (5, 6), ()]
    assert [request.prediction for request in engine.requests] == expected
    for text, shown in (("qqqqqqqqq", "9 tokens"), ("q" * 5000, "5000 characters")):
        with pytest.raises(InvalidRequest, match=f"prediction: '{shown}' is refused; it must be at most 8 tokens"):
            await events_of(generation, Request(text="hi", prediction_text=text))


async def test_the_engine_is_freed_before_the_last_event_is_read(tmp_path: Path) -> None:
    generation, engine, _ = fake_service(tmp_path, "hello the world")
    async with aclosing(generation.generate(Request(text="hi", stopping=Stopping(stop=["the"])))) as events:
        freed = [engine.freed.qsize() async for event in events if isinstance(event, Delta)]
    assert freed[0] == 0
    assert freed[-1] == 1


async def test_each_of_several_answers_has_its_own_text_stop_and_end(tmp_path: Path) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    texts = ["hello the world", "fish swim the world", "the world swim on and on"]
    scripts = [(*tokenizer.encode(text), 2) for text in texts]
    engine.script = lambda request: scripts[request.sampling.seed]
    request = Request(
        text="hi", request_id="r", n=3, stopping=Stopping(stop=["swim"]), sampling=common_pb2.SamplingParameters(seed=0)
    )
    started, *events = await events_of(generation, request)
    assert isinstance(started, Started)
    answers = [[event for event in events if not isinstance(event, Started) and event.index == i] for i in range(3)]
    assert [text_of([*answer]) for answer in answers] == ["hello the world", "fish ", "the world "]
    ends = [answer[-1] for answer in answers]
    assert [end.stop_string for end in ends if isinstance(end, Finished)] == [None, "swim", "swim"]
    assert engine.concluded == [("r", 1), ("r", 2)]
    for answer, end in zip(answers, ends, strict=True):
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == len(tokens_of([*answer]))
        assert sum(isinstance(event, Finished) for event in answer) == 1


async def test_several_answers_are_all_aborted(tmp_path: Path) -> None:
    generation, engine, _ = fake_service(tmp_path)
    engine.hold_after = 2
    async with aclosing(generation.generate(Request(text="hi", request_id="r", n=2))) as stream:
        events = [await anext(stream), await anext(stream)]
        assert generation.abort("r")
        events += [event async for event in stream]
    ends = [event for event in events if isinstance(event, Finished)]
    assert [(end.index, end.reason) for end in ends] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]


async def test_the_best_samples_are_returned_once_all_are_complete(tmp_path: Path) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    scripts = [(*tokenizer.encode(text), 2) for text in ("hello", "the", "world")]
    engine.script = lambda request: scripts[request.sampling.seed]
    engine.certainty = lambda request: [-1.0, -0.5, -1.0][request.sampling.seed]
    request = Request(text="hi", n=2, best_of=3, sampling=common_pb2.SamplingParameters(seed=0))
    started, *events = await events_of(generation, request)
    assert isinstance(started, Started)
    returned = [event for event in events if not isinstance(event, Started)]
    assert [event.index for event in returned] == sorted(event.index for event in returned)
    assert [event.index for event in returned if isinstance(event, Finished)] == [0, 1]
    assert text_of(events) == "thehello"
    assert all(not event.logprobs for event in events if isinstance(event, Delta))


async def test_best_samples_with_the_same_tokens_come_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    engine.script = lambda _: (*tokenizer.encode("hello"), 2)
    request = Request(text="hi", n=2, best_of=3, sampling=common_pb2.SamplingParameters(seed=0))
    for rounding in (0.0, 1e-7, -1e-7):
        engine.certainty = lambda request, rounding=rounding: request.sampling.seed * rounding - 1.0
        ends = [event for event in await events_of(generation, request) if isinstance(event, Finished)]
        assert [(end.index, end.seed) for end in ends] == [(0, 0), (1, 1)]


async def test_an_engine_that_ends_before_its_answers_is_an_error(tmp_path: Path) -> None:
    _, engine, tokenizer = fake_service(tmp_path)

    class EndingTooEarly(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
            async with aclosing(super().generate(replace(request, n=1))) as commits:
                async for commit in commits:
                    yield commit

    generation = GenerationService(EndingTooEarly(engine.script), tokenizer, LimitsSection())
    with pytest.raises(TargetUnavailable, match="broke off"):
        await events_of(generation, Request(text="hi", n=2))


async def test_an_answer_that_was_not_requested_is_an_error(tmp_path: Path) -> None:
    _, engine, tokenizer = fake_service(tmp_path)

    class WithUnknownAnswer(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
            async with aclosing(super().generate(request)) as commits:
                async for commit in commits:
                    yield replace(commit, index=7)

    generation = GenerationService(WithUnknownAnswer(engine.script), tokenizer, LimitsSection())
    with pytest.raises(TargetUnavailable, match="answer 7 was not requested"):
        await events_of(generation, Request(text="hi", n=2))


async def test_text_held_back_for_a_stop_string_is_sent_with_the_last_commit(tmp_path: Path) -> None:
    generation, _, _ = fake_service(tmp_path, "hello the w")
    assert text_of(await events_of(generation, Request(text="hi", stopping=Stopping(stop=["world"])))) == "hello the w"


async def test_an_answer_that_ends_within_a_character_has_a_replacement_character(tmp_path: Path) -> None:
    generation, _, _ = fake_service(tmp_path, "🐟")
    events = await events_of(generation, Request(text="hi", stopping=Stopping(max_tokens=2)))
    assert text_of(events) == "\N{REPLACEMENT CHARACTER}"
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH


async def test_closing_an_answer_frees_it(tmp_path: Path) -> None:
    generation, engine, _ = fake_service(tmp_path)
    async with aclosing(generation.generate(Request(text="hi", request_id="r"))) as events:
        await anext(events)
    assert engine.freed.get_nowait() == "r"


async def test_the_id_of_a_running_request_is_refused(tmp_path: Path) -> None:
    generation, _, _ = fake_service(tmp_path)
    request = Request(text="hi", request_id="r")
    async with aclosing(generation.generate(request)) as events:
        await anext(events)
        with pytest.raises(InvalidRequest, match="unlike those of running requests"):
            await events_of(generation, request)
    assert text_of(await events_of(generation, request)) == "hello the world"


@pytest.mark.parametrize("best_of", [2, 3])
async def test_a_request_that_has_not_reached_the_engine_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best_of: int
) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    run, entered, gate = tokenizer.texts.run, asyncio.Event(), asyncio.Event()

    async def held(chars: int, work: Callable[..., Any], *values: Any) -> Any:
        entered.set()
        await gate.wait()
        return await run(chars, work, *values)

    monkeypatch.setattr(tokenizer.texts, "run", held)
    reading = asyncio.create_task(events_of(generation, Request(text="hi", request_id="r", n=2, best_of=best_of)))
    await entered.wait()
    assert generation.abort("r")
    assert not generation.abort("r", "another client") and not generation.abort("other")
    gate.set()
    started, *ends = await reading
    assert isinstance(started, Started)
    assert [(end.index, end.reason) for end in ends if isinstance(end, Finished)] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]
    assert len(ends) == 2 and engine.requests == []
    assert not generation.abort("r")
    assert text_of(await events_of(generation, Request(text="hi", request_id="r"))) == "hello the world"


@pytest.mark.parametrize("refusal", [Overloaded("full", 2.0), NotReady("draining"), DeadlineExceeded("late")])
async def test_a_refusal_comes_before_any_event(tmp_path: Path, refusal: Exception) -> None:
    generation, engine, _ = fake_service(tmp_path)
    engine.refusal = refusal  # type: ignore[assignment]
    with pytest.raises(type(refusal)):
        await anext(generation.generate(Request(text="hi")))


async def test_nothing_is_admitted_before_the_engine_is_ready(tmp_path: Path) -> None:
    generation, engine, _ = fake_service(tmp_path)
    engine.ready = False
    with pytest.raises(NotReady):
        await anext(generation.generate(Request(text="hi")))


@pytest.mark.parametrize(("seconds", "expected"), [(None, 1050.0), (5.0, 1005.0), (1e6, 1050.0)])
async def test_a_deadline_is_that_of_the_caller_within_the_limit(
    tmp_path: Path, seconds: float | None, expected: float
) -> None:
    _, engine, tokenizer = fake_service(tmp_path)
    generation = GenerationService(engine, tokenizer, LimitsSection(max_timeout_seconds=50.0), clock=lambda: 1000.0)
    await events_of(generation, Request(text="hi"), seconds)
    assert engine.requests[0].deadline == expected


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    most = CONTEXT * tokenizer.longest_token_chars
    with pytest.raises(ContextLengthExceeded, match=f"at least {CONTEXT + 1} tokens > {CONTEXT - 1} maximum"):
        await anext(generation.generate(Request(text="x" * (most + 1))))
    assert engine.requests == []


async def test_tokenizing_and_detokenizing_are_each_others_inverse(tmp_path: Path) -> None:
    generation, _, _ = fake_service(tmp_path)
    tokens = await generation.tokenize(generation_pb2.TokenizeRequest(text="hello 🐟"))
    assert await generation.detokenize(generation_pb2.DetokenizeRequest(token_ids=tokens)) == "hello 🐟"
    with pytest.raises(InvalidRequest) as caught:
        await generation.detokenize(generation_pb2.DetokenizeRequest(token_ids=[9999]))
    assert caught.value.field == "token_ids[0]"


async def test_a_text_of_any_length_may_be_truncated(tmp_path: Path) -> None:
    generation, engine, tokenizer = fake_service(tmp_path)
    text, options = "hello the world " * 500, generation_pb2.PromptOptions(truncate=3)
    messages = [generation_pb2.ChatMessage(role="user", content=text)]
    await events_of(generation, Request(text=text, prompt_options=options))
    assert tuple(engine.requests[-1].prompt) == tokenizer.encode(text)[-3:]
    await events_of(generation, Request(chat=generation_pb2.ChatInput(messages=messages), prompt_options=options))
    assert len(engine.requests[-1].prompt) == 3
    with pytest.raises(ContextLengthExceeded):
        await events_of(generation, Request(text=text))
