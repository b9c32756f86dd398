"""An OpenAI-compatible server is measured by its streamed answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.core.errors import WorkerUnavailable
from deploy.bench.contestants.answers import BenchPrompt, PassRequest
from deploy.bench.contestants.endpoint import EndpointContestant, StreamReader
from deploy.bench.measuring.exactness import Judge
from deploy.bench.measuring.results import BenchResults, Cost, Entry
from deploy.bench.measuring.session import BenchSession, Schedule, Started


def events(*bodies: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + "data: [DONE]\n\n"


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


async def test_a_pass_asks_with_a_seed_for_each_prompt_and_reads_the_usage() -> None:
    bodies: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
        usage = {"completion_tokens": 5, "completion_tokens_details": details}
        receipt = {"accepted": 3, "accepted_by_origin": {"request": 1, "earlier": 2, "trained": 0, "forced": 0}}
        end = {"choices": [{"delta": {}, "receipt": receipt}]}
        return httpx.Response(200, text=events(chunk("Hel"), chunk("lo"), end, {"choices": [], "usage": usage}))

    async with httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://server:8000") as client:
        contestant = EndpointContestant(client, "small")
        prompts = (BenchPrompt((), "One?"), BenchPrompt((), "Two?"))
        found = await contestant.answer(PassRequest(prompts, 1, 0.5, 7, 16))
    assert [(body["messages"][0]["content"], body["seed"], body["temperature"]) for body in bodies] == [
        ("One?", 7, 0.5),
        ("Two?", 8, 0.5),
    ]
    answer = found.answers[0]
    assert (answer.text, answer.completion_tokens, answer.drafted, answer.steps) == ("Hello", 5, 5, 2)
    assert [arrival.tokens for arrival in answer.arrivals] == [2, 3]
    assert answer.accepted_by_origin == {"request": 1, "earlier": 2, "trained": 0, "forced": 0}
    assert found.tokens == 10


async def test_a_prediction_is_sent_where_the_prompt_has_one() -> None:
    bodies: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens": 3}
        usage |= {"completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 0}}
        return httpx.Response(200, text=events(chunk("a"), {"choices": [], "usage": usage}))

    async with httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://server") as client:
        contestant = EndpointContestant(client, "small", predicts=True)
        prompts = (BenchPrompt((), "Correct: he go", "he go"), BenchPrompt((), "Two?"))
        found = await contestant.answer(PassRequest(prompts, 1, 0.0, 0, 16))
    assert bodies[0]["prediction"] == {"type": "content", "content": "he go"} and "prediction" not in bodies[1]
    assert (found.answers[0].prompt_tokens, found.answers[0].cached_tokens) == (9, 8)
    # with a prediction, the usage counts that, and not drafted tokens
    assert [answer.steps for answer in found.answers] == [0, 2]


def test_a_server_without_counts_of_drafts_has_no_steps() -> None:
    reader = StreamReader()
    for line in events(chunk("a"), chunk("b")).splitlines():
        reader.line(line)
    assert (reader.answer().completion_tokens, reader.answer().steps) == (2, 0)


def test_an_event_without_an_error_may_name_none() -> None:
    reader = StreamReader()
    reader.line(f"data:{json.dumps({**chunk('a'), 'error': None})}")
    assert reader.answer().text == "a"
    with pytest.raises(WorkerUnavailable, match="with an error: too long"):
        reader.line('data:{"error": "too long"}')


async def test_an_error_of_the_server_names_its_address() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, text="no such model"))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        with pytest.raises(WorkerUnavailable, match=r"http://server/v1/chat/completions answered 404: no such model"):
            await EndpointContestant(client, "m").answer(PassRequest((BenchPrompt((), "One?"),), 1, 0.0, 0, 4))


async def test_a_server_has_answered_every_prompt_before_its_first_measured_pass() -> None:
    """The prefix cache of a server would have the prompts in all passes but the first; it need not have the answers."""
    asked: list[tuple[str, int]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append((body["messages"][0]["content"], body["max_tokens"]))
        return httpx.Response(200, text=events(chunk("a")))

    texts = [f"{number}?" for number in range(6)]
    tasks = {"questions": tuple(BenchPrompt((), text) for text in texts)}
    schedule = Schedule(4, batches=(1, 2))
    session = BenchSession(schedule, tasks, BenchResults("", {}, ""), lambda *_: None, lambda _: None, 1)
    async with httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://server") as client:
        entry = Entry("http://server", "endpoint", (), Cost())
        await session.measure([Started(entry, EndpointContestant(client, "m"), Judge(0.0))], None)
    stored, compiled, measured = asked[:6], asked[6:12], asked[12:]
    assert stored == [(text, 1) for text in texts]  # once, whatever the number of batches
    assert compiled == [(text, 4) for text in texts[:2] + texts[:4]]
    assert measured == [(text, 4) for text in texts * 2]
