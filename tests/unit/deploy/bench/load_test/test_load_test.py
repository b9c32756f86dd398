"""A load test of a real HTTP API over a scripted engine, and of servers that refuse or break off."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.errors import WorkerUnavailable
from deploy.bench.load_test.records import Measurement
from deploy.bench.load_test.run import LoadTest
from deploy.bench.options import Endpoint, LoadOptions
from deploy.commands.client.connection import server_client
from deploy.settings import load_settings
from tests.support.fakes.both_apis import BothApis, apis
from tests.support.terminal import run_command

__all__ = ["apis"]


async def measure(options: LoadOptions, client: httpx.AsyncClient) -> tuple[list[Measurement], str]:
    found: list[Measurement] = []
    test = LoadTest(options, client, lambda share, _: None)
    async with client:
        await test.run(found.append)
    return found, test.model


@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_every_request_is_answered_and_counted(apis: BothApis, endpoint: Endpoint) -> None:
    options = LoadOptions(
        url=f"{apis.http.base_url}/v1/",
        endpoint=endpoint,
        num_prompts=5,
        random_input_len=3,
        max_tokens=8,
        max_concurrency=(1, 3),
        goodput=("ttft:60000",),
    )
    found, model = await measure(options, server_client(load_settings(environment={}), options.url))
    assert model == (await apis.client.list_models())[0].id
    assert [(each.max_concurrency, len(each.completed)) for each in found] == [(1, 5), (3, 5)]
    for each in found:
        assert each.output_tokens > 0 and each.prompt_tokens > 0 and each.most_in_flight <= each.max_concurrency
        assert each.goodput == each.per_second(5)


def answering(responses: list[httpx.Response]) -> httpx.AsyncClient:
    """A client of a server that gives these responses in turn."""
    turn = iter(responses)
    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(lambda _: next(turn)))


def events(*bodies: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + "data: [DONE]\n\n")


OK: dict[str, Any] = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}


async def test_an_answer_may_hold_characters_that_end_a_line_elsewhere() -> None:
    event = json.dumps({**OK, "choices": [{"text": "a\u2028b\x85"}]}, ensure_ascii=False)
    responses = [httpx.Response(200, content=f"data: {event}\n\ndata: [DONE]\n\n".encode()) for _ in range(2)]
    options = LoadOptions(model="m", num_prompts=1, random_input_len=1, max_concurrency=(1,))
    ((found,), _) = await measure(options, answering(responses))
    assert (len(found.completed), found.errors) == (1, {})


async def test_failures_are_counted_by_what_the_server_says() -> None:
    full = {"error": {"message": "100 requests wait\nalready", "code": None}}
    refused = [httpx.Response(429, json=full), httpx.Response(429, json=full), httpx.Response(429)]
    refused += [httpx.Response(502, text="<html>bad gateway"), httpx.Response(503, text="x" * 5000)]
    refused += [httpx.Response(400, json=[1]), httpx.Response(400, json={"detail": "as FastAPI says it"})]
    responses = [events(OK), events(OK), *refused, events({"error": {"message": "lost"}}), events({"error": "gone"})]
    options = LoadOptions(model="m", num_prompts=len(responses) - 1, random_input_len=1, max_concurrency=(1,))
    ((found,), _) = await measure(options, answering(responses))
    assert (len(found.completed), found.prompt_tokens) == (1, 2)
    assert found.errors == {
        "HTTP 429: 100 requests wait already": 2,
        "HTTP 429": 1,
        "HTTP 502: <html>bad gateway": 1,
        f"HTTP 503: {'x' * 290}": 1,
        "HTTP 400: [1]": 1,
        'HTTP 400: {"detail":"as FastAPI says it"}': 1,
        "the server ended the answer with an error: lost": 1,
        "the server ended the answer with an error: gone": 1,
    }


@pytest.mark.parametrize("event", ["{", "7", "[" * 100_000], ids=["cut off", "a number", "deep"])
async def test_what_is_no_event_is_a_failed_request(event: str) -> None:
    options = LoadOptions(model="m", num_prompts=2, random_input_len=1, max_concurrency=(1,))
    responses = [events(OK), httpx.Response(200, text=f"data: {event}\n\n"), events(OK)]
    ((found,), _) = await measure(options, answering(responses))
    assert (len(found.completed), [*found.errors.values()]) == (1, [1])
    assert next(iter(found.errors)).startswith("the server sent no event, but ")


async def test_a_cancelled_test_keeps_what_has_ended() -> None:
    served = 0

    async def serve(_: httpx.Request) -> httpx.Response:
        nonlocal served
        served += 1
        if served > 3:  # the request that is not counted, and two that are
            running.cancel()
            await asyncio.sleep(60)
        return events(OK)

    client = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(serve))
    found: list[Measurement] = []
    options = LoadOptions(model="m", num_prompts=5, random_input_len=1, max_concurrency=(1,))
    running = asyncio.create_task(LoadTest(options, client, lambda *_: None).run(found.append))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [len(each.completed) for each in found] == [2]


async def test_a_server_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(WorkerUnavailable, match=r"/v1/chat/completions did not answer: HTTP 503: no drafter"):
        await measure(
            LoadOptions(model="m"), answering([httpx.Response(503, json={"error": {"message": "no drafter"}})])
        )
    with pytest.raises(WorkerUnavailable, match="names no model"):
        await measure(LoadOptions(), answering([httpx.Response(200, json={"data": []})]))


def test_bounds_may_follow_without_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[LoadOptions] = []

    def run(options: LoadOptions, *_: object) -> None:
        seen.append(options)
        raise WorkerUnavailable("stop here")

    monkeypatch.setattr("deploy.bench.load_test.run.run_load_test", run)
    assert run_command("bench", "serve", "--goodput", "ttft:500", "tpot:50", "--request-rate", "1,inf") == 1
    assert (seen[0].goodput, seen[0].request_rate[0]) == (("ttft:500", "tpot:50"), 1.0)
