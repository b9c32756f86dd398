"""Many generation calls over one stream: each behaves as a call of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded, TargetUnavailable, TooLarge
from cluster.wire import connection, coordinator_client, coordinator_service
from cluster.wire.connection import fixed_address
from cluster.wire.coordinator_client import MOST_REQUEST_BYTES, CoordinatorClient
from cluster.wire.coordinator_service import WINDOW, CoordinatorServicer
from cluster.wire.server import COORDINATOR_SERVICE, WireServer
from pilotfish.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2
from tests.support.deadline import deadline
from tests.support.fakes.fake_cluster import until

Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]
LONG_START = 100_000
"""Bytes of the first response of calls named "starts"."""


def request(kind: str, count: int = 0) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(request_id=kind, max_draft_tokens=count)


def response(index: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(index=index)


@dataclass
class Service:
    """Counts to the number that the request says, or does what its id says."""

    begun: int = 0
    cancelled: int = 0
    produced: dict[str, int] = field(default_factory=dict)
    timeouts: list[float] = field(default_factory=list)
    waiting: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets the calls named "together" and "starts" begin to count."""

    async def generate(self, message: generation_pb2.GenerateRequest, seconds: float) -> Responses:
        self.begun += 1
        self.timeouts.append(seconds)
        try:
            if message.request_id == "refused":
                raise InvalidRequest("temperature", 9, "between 0 and 2")
            if message.request_id == "full":
                raise Overloaded("full", 3.0)
            if message.request_id in ("together", "starts"):
                self.waiting += 1
                await self.gate.wait()
            if message.request_id == "starts":
                started = generation_pb2.GenerationStarted(prompt_token_bytes=[bytes(LONG_START)])
                yield generation_pb2.GenerateResponse(started=started)
            for index in range(message.max_draft_tokens):
                self.produced[message.request_id] = index + 1
                yield response(index)
                await asyncio.sleep(0)
            if message.request_id == "lost":
                raise TargetUnavailable("the target is lost")
            if message.request_id == "bug":
                raise ZeroDivisionError
            if message.request_id == "hangs":
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise


@dataclass
class Served:
    service: Service
    server: WireServer
    client: CoordinatorClient
    messages: list[int]
    """Number of events in each message of the server."""


class CountingServicer(CoordinatorServicer):
    """Records the number of events in each message."""

    def __init__(self, service: Service) -> None:
        super().__init__(service.generate)
        self.messages: list[int] = []

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the schema's
        async for message in super().Generate(request_iterator, context):
            self.messages.append(len(message.events))
            yield message


@asynccontextmanager
async def served(most_bytes: int = MAX_MESSAGE_BYTES) -> AsyncIterator[Served]:
    service = Service()
    servicer = CountingServicer(service)
    async with deadline(60.0), WireServer("127.0.0.1", 0, max_message_bytes=most_bytes) as server:
        add_to_server = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
        server.add(COORDINATOR_SERVICE, add_to_server, servicer)
        client = CoordinatorClient(fixed_address(f"127.0.0.1:{await server.start()}"))
        yield Served(service, server, client, servicer.messages)
        await client.close()


async def read_all(
    client: CoordinatorClient,
    message: generation_pb2.GenerateRequest,
    seconds: float = 30.0,
    into: list[int] | None = None,
) -> list[int]:
    """The indices of the responses, in the order of their arrival."""
    found: list[int] = [] if into is None else into
    async for one in client.generate(message, seconds):
        found.append(one.index)  # noqa: PERF401 - the caller keeps them also if the call fails
    return found


async def test_every_call_receives_its_own_responses_in_order() -> None:
    async with served() as it:
        counts = [0, 1, 5, 3 * WINDOW, 40, 41]
        answers = await asyncio.gather(*(read_all(it.client, request(f"r{n}", n)) for n in counts))
    assert answers == [list(range(n)) for n in counts]


async def test_a_stream_that_is_cancelled_ends_its_calls_and_the_next_one_opens_another() -> None:
    async with served() as it:
        waiting = asyncio.create_task(read_all(it.client, request("together", 1)))
        await until(lambda: it.service.waiting == 1)
        channel = await it.client._connection.channel()
        it.client._connection._channel = None
        await channel.close()
        with pytest.raises(NotReady, match="closed"):
            await waiting
        assert await read_all(it.client, request("r", 2)) == [0, 1]


async def test_events_of_several_calls_at_once_share_a_message() -> None:
    async with served() as it:
        calls = [asyncio.create_task(read_all(it.client, request("together", 1))) for _ in range(5)]
        await until(lambda: it.service.waiting == 5)
        it.service.gate.set()
        assert await asyncio.gather(*calls) == [[0]] * 5
    assert it.messages[0] == 5


async def test_errors_arrive_as_they_were_raised_after_all_responses_and_touch_no_other_call() -> None:
    before_the_loss: list[int] = []
    async with served() as it:
        running = asyncio.create_task(read_all(it.client, request("long", 500)))
        with pytest.raises(InvalidRequest, match="temperature: 9 is refused"):
            await read_all(it.client, request("refused"))
        with pytest.raises(Overloaded) as full:
            await read_all(it.client, request("full"))
        with pytest.raises(TargetUnavailable, match="the target is lost"):
            await read_all(it.client, request("lost", 7), into=before_the_loss)
        with pytest.raises(Exception, match="its log has the cause"):
            await read_all(it.client, request("bug", 1))
        assert await running == list(range(500))
    assert full.value.retry_after_seconds == 3.0
    assert before_the_loss == list(range(7))


async def test_a_call_that_its_reader_leaves_is_cancelled() -> None:
    async with served() as it:
        async with aclosing(it.client.generate(request("hangs", 2), 30.0)) as responses:
            assert (await anext(responses)).index == 0
        await until(lambda: it.service.cancelled > 0)
        assert await read_all(it.client, request("next", 3)) == [0, 1, 2]
    assert it.service.begun == 2


async def test_a_slow_reader_holds_its_own_call_only() -> None:
    async with served() as it, aclosing(it.client.generate(request("slow", 10 * WINDOW), 30.0)) as slow:
        assert (await anext(slow)).index == 0
        assert await read_all(it.client, request("fast", 5 * WINDOW)) == list(range(5 * WINDOW))
        assert it.service.produced["slow"] <= WINDOW + WINDOW // 2
        assert [one.index async for one in slow] == list(range(1, 10 * WINDOW))


async def test_when_the_stream_breaks_all_calls_say_so_and_the_next_one_opens_another() -> None:
    async with served() as it:
        reading = [asyncio.create_task(read_all(it.client, request("hangs", n))) for n in (1, 2)]
        await until(lambda: it.service.begun == len(reading))
        await it.server.stop(0.0)
        outcomes = await asyncio.gather(*reading, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotReady, NotReady]
        port = await it.server.start()
        it.client._connection._resolve = fixed_address(f"127.0.0.1:{port}")
        assert await read_all(it.client, request("again", 3)) == [0, 1, 2]


async def test_a_stopping_server_sends_what_ended_calls_have_left() -> None:
    async with served() as it:
        reading = asyncio.create_task(read_all(it.client, request("long", WINDOW // 2)))
        await until(lambda: it.service.begun > 0)
        await it.server.stop(5.0)
        assert await reading == list(range(WINDOW // 2))


async def test_the_coordinator_knows_the_deadline_and_the_client_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_client, "_LATE_SECONDS", 0.0)
    async with served() as it:
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.2 s"):
            await read_all(it.client, request("hangs", 1), 0.2)
    assert it.service.timeouts == [0.2]


async def test_what_is_wrong_with_one_request_ends_its_own_call_only() -> None:
    unknown_field = b"\xfa\xff\xff\xff\x0f\x01a"
    cases = [
        (coordinator_pb2.CallBegin(request=b"\xff", timeout_seconds=1.0), "message"),
        (coordinator_pb2.CallBegin(request=unknown_field, timeout_seconds=1.0), "unknown field"),
        (coordinator_pb2.CallBegin(timeout_seconds=0.0), "timeout_seconds: 0.0 is refused"),
        (coordinator_pb2.CallBegin(timeout_seconds=float("nan")), "timeout_seconds: nan is refused"),
    ]
    async with served() as it:
        running = asyncio.create_task(read_all(it.client, request("long", 500)))
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(await it.client._connection.channel())
        stream = stub.Generate()
        for number, (begin, reason) in enumerate(cases, start=1):
            await stream.write(coordinator_pb2.CoordinatorServiceGenerateRequest(call=number, begin=begin))
            (event,) = (await stream.read()).events
            assert event.call == number
            assert event.end.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert reason in event.end.message
        begin = coordinator_pb2.CallBegin(request=request("good", 1).SerializeToString(), timeout_seconds=1.0)
        await stream.write(coordinator_pb2.CoordinatorServiceGenerateRequest(call=9, begin=begin))
        assert (await stream.read()).events[0].response == response(0)
        stream.cancel()
        assert await running == list(range(500))


async def test_a_request_that_no_message_can_hold_ends_its_own_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 10_000
    monkeypatch.setattr(coordinator_client, "MOST_REQUEST_BYTES", most, raising=False)
    async with served(most + 1024) as it:
        running = asyncio.create_task(read_all(it.client, request("long", 500)))
        await until(lambda: it.service.begun > 0)
        with pytest.raises(TooLarge, match=f"at most {most} bytes"):
            await read_all(it.client, generation_pb2.GenerateRequest(text="x" * 2 * most))
        longest = request("longest", 3)
        longest.text = "x" * (most - longest.ByteSize() - 3)
        assert longest.ByteSize() == most
        assert await read_all(it.client, longest) == [0, 1, 2]
        assert await running == list(range(500))


async def test_whatever_breaks_the_stream_is_no_mistake_of_its_calls() -> None:
    async with served(10_000) as it:
        running = asyncio.create_task(read_all(it.client, request("hangs", 1)))
        await until(lambda: it.service.begun > 0)
        too_long = generation_pb2.GenerateRequest(text="x" * 20_000)
        for reading in (asyncio.create_task(read_all(it.client, too_long)), running):
            with pytest.raises(NotReady, match="the stream of calls broke: "):
                await reading
        assert await read_all(it.client, request("again", 3)) == [0, 1, 2]


def test_what_surrounds_a_request_in_its_message_is_short() -> None:
    begin = coordinator_pb2.CallBegin(request=bytes(MOST_REQUEST_BYTES), timeout_seconds=3600.0)
    message = coordinator_pb2.CoordinatorServiceGenerateRequest(call=2**64 - 1, begin=begin)
    assert MOST_REQUEST_BYTES < message.ByteSize() <= MAX_MESSAGE_BYTES


async def test_starts_with_long_prompts_share_no_message_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 5 * LONG_START)
    monkeypatch.setattr(coordinator_service, "_MOST_STARTED_BYTES", 3 * LONG_START, raising=False)
    async with served() as it:
        calls = [asyncio.create_task(read_all(it.client, request("starts", 3))) for _ in range(7)]
        await until(lambda: it.service.waiting == 7)
        it.service.gate.set()
        assert await asyncio.gather(*calls) == [[0, 0, 1, 2]] * 7  # together, they are longer than a message may be
    assert len(it.messages) >= 3


async def test_a_malformed_message_ends_the_stream_with_its_reason() -> None:
    async with served() as it:
        channel = await it.client._connection.channel()
        for message, reason in (
            (coordinator_pb2.CoordinatorServiceGenerateRequest(call=1), "action"),
            (coordinator_pb2.CoordinatorServiceGenerateRequest(call=0, begin=coordinator_pb2.CallBegin()), "call"),
        ):
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            stream = stub.Generate(iter([message]))
            with pytest.raises(Exception, match=f"{reason}: .* is refused"):
                await stream.read()
