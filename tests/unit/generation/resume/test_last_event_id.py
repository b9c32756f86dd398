"""A client whose connection breaks sends the same body with `Last-Event-ID`, and gets exactly the events after it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.ingress.http import create_app
from cluster.ingress.openai.event_ids import MAX_ID_CHARS, MOST_CHOICES, EventId, EventIds, Stage, parse_event_id
from cluster.ingress.openai.formats import Choice
from pilotfish.v1 import common_pb2
from tests.support.clusters.fake_coordinators import CuttableConnections, FakeReplicas, fake_replicas
from tests.support.fakes.fake_cluster import until
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import HttpApi
from tests.support.slow import slow_but

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello the world"}]}
PLAIN: dict[str, Any] = {"prompt": "hello the world"}
TOKENS = 16
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT),
    "chat with log-probabilities": ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "several answers": ("chat/completions", CHAT | {"n": 3, "return_token_ids": True}),
    "stop strings": ("completions", PLAIN | {"stop": ["a", "b", "c", "he"], "n": 2}),
    "text offsets": ("completions", PLAIN | {"logprobs": 1}),
    "several prompts": ("completions", {"prompt": ["hello", "the world", "fish"], "n": 2, "return_token_ids": True}),
    "no seed": ("completions", PLAIN | {"seed": None, "return_token_ids": True}),
}


@dataclass
class StreamedChoices:
    """All that a client received of a response, apart from how it was split into events."""

    choices: dict[int, list[Any]] = field(default_factory=dict)
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    """What all chunks share: there must be one."""
    usage: list[tuple[int, int]] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    """Tokens of each choice by its receipt: the accepted ones, and one of the target's own for each pass."""

    def add(self, chunk: dict[str, Any]) -> None:
        self.heads.add(tuple(chunk[key] for key in ("id", "created", "model", "seed")))
        if chunk.get("usage"):
            self.usage.append((chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]))
        for choice in chunk["choices"]:
            text, roles, tokens, logprobs, ends = self.choices.setdefault(choice["index"], ["", [], [], [], []])
            delta = choice.get("delta", {"content": choice.get("text")})
            roles += [delta["role"]] if "role" in delta else []
            tokens += choice.get("token_ids", [])
            logprobs += _entries(choice["logprobs"])
            ends += [choice["finish_reason"], choice["stop_reason"]] if choice["finish_reason"] else []
            if (receipt := choice.get("receipt")) is not None:
                self.decided.append(receipt["accepted"] + receipt["target_passes"])
            self.choices[choice["index"]][0] = text + (delta.get("content") or "")


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True))


@dataclass
class Ingresses:
    """Two ingresses over the same coordinators. They share nothing else."""

    urls: list[str]
    http: httpx.AsyncClient
    cluster: FakeReplicas

    async def events(
        self, ingress: int, path: str, body: dict[str, Any], last: str | None = None, most: int | None = None
    ) -> list[tuple[str, str]]:
        """Ids and data of the first `most` events, or of all; then the connection is closed."""
        received: list[tuple[str, str]] = []
        async with aclosing(self.stream(ingress, path, body, last)) as events:
            async for event in events:
                received.append(event)
                if len(received) == most:
                    break
        return received

    async def stream(
        self, ingress: int, path: str, body: dict[str, Any], last: str | None
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Yield ids and data of the events after `last`."""
        headers = {} if last is None else {"Last-Event-ID": last}
        async with self.http.stream("POST", f"{self.urls[ingress]}/v1/{path}", json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    yield event_id, line.removeprefix("data: ")


@asynccontextmanager
async def ingresses(directory: Path, count: int = 1, **overrides: object) -> AsyncIterator[Ingresses]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        cluster = await enter(fake_replicas(directory, count, **overrides))
        urls = [await enter(listening(create_app(cluster.router(), LimitsSection()))) for _ in range(2)]
        yield Ingresses(urls, await enter(httpx.AsyncClient(timeout=60.0)), cluster)


def read(events: list[tuple[str, str]]) -> StreamedChoices:
    received = StreamedChoices()
    assert events[-1][1] == "[DONE]"
    for _, data in events[:-1]:
        received.add(json.loads(data))
    assert len(received.heads) == 1
    return received


def body_of(values: dict[str, Any]) -> dict[str, Any]:
    common = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS}
    return common | {"seed": 5, "ignore_eos": True} | values


@pytest.mark.parametrize("case", BODIES)
async def test_a_stream_cut_after_any_event_continues_at_another_ingress(tmp_path: Path, case: str) -> None:
    path, values = BODIES[case]
    body = body_of(values)
    async with ingresses(tmp_path) as both:
        whole = await both.events(0, path, body)
        assert len({event_id for event_id, _ in whole}) == len(whole)
        if body["seed"] is None:
            body["seed"] = json.loads(whole[0][1])["seed"]
            whole = await both.events(0, path, body)
        expected = read(whole)
        for most in range(1, len(whole), 1 + len(whole) // 12):
            first = await both.events(0, path, body, most=most)
            rest = await both.events(1, path, body, last=first[-1][0])
            found = read([*first, *rest])
            assert found.choices == expected.choices
            assert found.usage == expected.usage
            # A stop string may leave out what a last pass added.
            assert 0 <= sum(found.decided) - found.usage[-1][1] <= len(found.decided)
            assert len({event_id for event_id, _ in (*first, *rest)}) == len(first) + len(rest)


@pytest.mark.parametrize("rounds", slow_but([3], [3, 8]))
async def test_streams_survive_dying_ingresses_and_coordinators(tmp_path: Path, rounds: int) -> None:
    draw, deaths = random.Random(9), 0
    path, values = BODIES["several answers"]
    bodies = [body_of(values | {"seed": seed, "max_tokens": 40}) for seed in range(4)]
    async with ingresses(tmp_path, 2, step_delay=0.002) as both:
        expected = [read(await both.events(0, path, body)) for body in bodies]
        direct = list(both.urls)
        for round_number in range(rounds):
            dying = [CuttableConnections(int(url.rpartition(":")[2])) for url in direct]
            for connections in dying:
                await connections.start()
            both.urls = [f"http://{connections.address}" for connections in dying]

            async def read_on(body: dict[str, Any]) -> StreamedChoices:
                received: list[tuple[str, str]] = []
                ingress = 0
                while not received or received[-1][1] != "[DONE]":
                    last = received[-1][0] if received else None
                    with suppress(httpx.TransportError):
                        async for event in both.stream(ingress % 2, path, body, last):
                            received.append(event)  # noqa: PERF401 - what came before an error counts
                    ingress += 1
                return read(received)

            reading = [asyncio.create_task(read_on(body)) for body in bodies]
            await asyncio.sleep(draw.uniform(0.03, 0.1))
            deaths += sum(not task.done() for task in reading) if dying[0].cut() else 0
            if round_number % 2:
                await both.cluster.kill_one(draw)
            assert [one.choices for one in await asyncio.gather(*reading)] == [one.choices for one in expected]
            for connections in dying:
                await connections.close()
    assert deaths > rounds


async def test_a_body_without_a_seed_continues_with_the_seed_of_its_stream(tmp_path: Path) -> None:
    path, values = BODIES["no seed"]
    body = body_of(values)
    async with ingresses(tmp_path) as both:
        first = await both.events(0, path, body, most=4)
        seed = json.loads(first[0][1])["seed"]
        found = read([*first, *await both.events(1, path, body, last=first[-1][0])])
        expected = read(await both.events(0, path, body | {"seed": seed}))
        assert found.choices == expected.choices


async def test_a_resumed_stream_goes_to_the_coordinator_that_still_holds_its_tokens(tmp_path: Path) -> None:
    path, values = BODIES["no seed"]
    async with ingresses(tmp_path, 2, step_delay=0.001, draft__method="none") as both:
        for seed in range(6):
            body = body_of(values | {"seed": seed, "prompt": f"prompt {seed}", "max_tokens": 100})
            first = await both.events(0, path, body, most=80)
            steps = sum(len(replica.target.batches) for replica in both.cluster.replicas)
            await both.events(1, path, body, last=first[-1][0])
            later = sum(len(replica.target.batches) for replica in both.cluster.replicas) - steps
            assert later < 60  # the end of the first call and of the resumed one; again from the start it is 100
        assert all(replica.target.batches for replica in both.cluster.replicas)


async def test_a_body_of_the_longest_length_breaks_no_stream_of_others(tmp_path: Path) -> None:
    """The request that an ingress sends to a coordinator is longer than what the client has sent."""
    limits = LimitsSection(max_body_bytes=1 << 16)
    overrides: dict[str, object] = {"limits__max_body_bytes": limits.max_body_bytes, "step_delay": 0.02}
    path, values = BODIES["chat"]
    body = body_of(values | {"max_tokens": 300})
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        cluster = await enter(fake_replicas(tmp_path, 1, **overrides))  # type: ignore[arg-type]
        url = await enter(listening(create_app(cluster.router(), limits)))
        both = Ingresses([url], await enter(httpx.AsyncClient(timeout=60.0)), cluster)
        running = asyncio.create_task(both.events(0, path, body))
        await until(lambda: bool(cluster.replicas[0].target.batches))
        longest = json.dumps({"prompt": ""})
        longest = json.dumps({"prompt": "x" * (limits.max_body_bytes - len(longest))})
        assert len(longest) == limits.max_body_bytes
        headers = {"content-type": "application/json"}
        answer = await both.http.post(f"{url}/v1/completions", content=longest, headers=headers)
        assert not running.done()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text
        found = read(await running)
        assert cluster.resumed == []
    assert found.choices[0][4][0] == "length"


def test_the_longest_id_of_the_most_choices_can_be_sent_back() -> None:
    most = 99_999_999
    origins = common_pb2.OriginCounts(request=most, earlier=most, trained=most, forced=most)
    choices = []
    for index in range(MOST_CHOICES):
        counts = {"received": most, "drafted": 9_999_999_999, "accepted": most, "text_length": 999_999_999}
        choice = Choice(index, is_started=True, origins=origins, **counts)  # type: ignore[arg-type]
        assert choice.utf8.decode("🐟".encode()[:3]) == ""
        choices.append(choice)
    last = EventId("r" * 64, 2**64 - 1, 2**40 - 1, "0" * 12, "c" * 64)
    text = EventIds(last, choices).next(Stage.CHOICES)
    assert 0.9 * MAX_ID_CHARS < len(text) <= MAX_ID_CHARS
    assert len(parse_event_id(text).choices) == MOST_CHOICES
    assert EventIds(last, [*choices, Choice(MOST_CHOICES)]).next(Stage.CHOICES) == ""


async def test_events_of_very_many_choices_have_no_ids(tmp_path: Path) -> None:
    """Each id would name the state of all choices, and be longer than the rest of its event."""
    api = HttpApi(tmp_path, limits=LimitsSection())
    sizes = {}
    for n in (3, 4):
        body = {"prompt": ["hi"] * 64, "n": n, "stream": True}
        assert MOST_CHOICES == 64 * 3
        response = await api.http.post("/v1/completions", json=body)
        assert response.status_code == 200
        events = response.text.removesuffix("\n\n").split("\n\n")
        assert {event.startswith("id: ") for event in events} == {n == 3}
        found = [json.loads(event.rpartition("data: ")[2]) for event in events[:-1]]
        ended = [one for event in found for one in event["choices"] if one["finish_reason"] == "stop"]
        assert sorted(one["index"] for one in ended) == list(range(64 * n))
        sizes[n] = len(response.text) / len(events)
    assert sizes[4] < 1500 < sizes[3]


async def test_nothing_follows_the_last_event_and_only_the_end_follows_the_usage(tmp_path: Path) -> None:
    path, values = BODIES["chat"]
    async with ingresses(tmp_path) as both:
        whole = await both.events(0, path, body_of(values))
        assert await both.events(1, path, body_of(values), last=whole[-1][0]) == []
        assert [data for _, data in await both.events(1, path, body_of(values), last=whole[-2][0])] == ["[DONE]"]


async def test_ids_that_are_wrong_or_of_another_body_are_refused(tmp_path: Path) -> None:
    path, values = BODIES["chat"]
    body = body_of(values)
    async with ingresses(tmp_path) as both:
        event_id = (await both.events(0, path, body, most=2))[-1][0]
        request_id, seed, created, digest, _, choices, stage = event_id.split("/")
        wrong = [
            "",
            "x",
            event_id + "/c",
            event_id.replace(request_id, "ü" * 32).encode("latin-1"),
            f"{request_id}/{seed}/{created}/{digest}/a b/{choices}/{stage}",
            f"{request_id}/{seed}/{created}/{digest}//{choices},{choices}/{stage}",
            f"{request_id}/{seed}/{created}/{digest}//s99999999.0.0.0./{stage}",
            f"{request_id}/{seed}/{created}/{digest}//s3.0.2.0./{stage}",
            f"{request_id}/{seed}/{created}/{digest}//{'9' * 20000}/{stage}",
        ]
        url = f"{both.urls[1]}/v1/{path}"
        for text in wrong:
            answer = await both.http.post(url, json=body, headers={"Last-Event-ID": text})
            assert answer.status_code in (400, 431), text
        for other in ({"max_tokens": 5}, {"seed": 6}, {"stream": False, "stream_options": None}):
            answer = await both.http.post(url, json=body | other, headers={"Last-Event-ID": event_id})
            assert answer.status_code == 400
            assert "Last-Event-ID" in answer.json()["error"]["message"]


async def test_the_client_of_openai_reads_a_resumed_stream(tmp_path: Path) -> None:
    async with ingresses(tmp_path) as both:
        body = {"model": "fake", "prompt": "hello", "max_tokens": TOKENS, "seed": 5, "stream": True}
        whole = await both.events(0, "completions", body)
        text = "".join(json.loads(data)["choices"][0]["text"] for _, data in whole[:-1])
        first = await both.events(0, "completions", body, most=3)
        begun = "".join(json.loads(data)["choices"][0]["text"] for _, data in first)
        async with openai.AsyncOpenAI(base_url=f"{both.urls[1]}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="fake",
                prompt="hello",
                max_tokens=TOKENS,
                seed=5,
                stream=True,
                extra_headers={"Last-Event-ID": first[-1][0]},
            )
            rest = "".join([chunk.choices[0].text async for chunk in stream])
        assert begun + rest == text
