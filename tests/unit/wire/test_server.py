"""The gRPC server on real sockets: health, reflection, refused messages, errors."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.core.errors import (
    Aborted,
    ConfigurationError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvPoolExhausted,
    NotReady,
    Overloaded,
    PilotfishError,
    TargetUnavailable,
    TooLarge,
    UnknownModel,
    UnsupportedParameter,
)
from cluster.core.ids import SequenceId
from cluster.core.verification import StepBatch, VerifyRow
from cluster.wire.generation_client import GenerationClient
from cluster.wire.server import WireServer
from cluster.wire.status import to_status
from cluster.wire.target_client import GrpcTarget
from tests.support.fakes.wire_servers import (
    BATCH,
    DRAFT,
    GENERATION,
    HOST,
    MOST_BYTES,
    OPERATIONS,
    RESULT,
    TARGET,
    TIMEOUT_SECONDS,
    Request,
    ScriptedServer,
    refusal,
    words,
)
from tests.support.fakes.wire_servers import channel as channel
from tests.support.fakes.wire_servers import client as client
from tests.support.fakes.wire_servers import drafter as drafter
from tests.support.fakes.wire_servers import scripted as scripted
from tests.support.fakes.wire_servers import target as target

# --- health and reflection ----------------------------------------------------------------------------------


async def test_the_process_is_alive_at_start_and_a_service_once_it_is_set_serving(
    scripted: ScriptedServer, channel: grpc.aio.Channel
) -> None:
    check = health_pb2_grpc.HealthStub(channel).Check
    alive = await check(health_pb2.HealthCheckRequest())
    before = await check(health_pb2.HealthCheckRequest(service=TARGET))
    await scripted.server.set_serving(TARGET, True)
    after = await check(health_pb2.HealthCheckRequest(service=TARGET))
    other = await check(health_pb2.HealthCheckRequest(service=DRAFT))
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert [answer.status for answer in (alive, before, after, other)] == [serving, not_serving, serving, not_serving]


async def test_an_unknown_service_has_no_health(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_every_service(channel: grpc.aio.Channel) -> None:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask())
    answers = [answer async for answer in call]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names >= {TARGET, DRAFT, GENERATION, OPERATIONS, "grpc.health.v1.Health"}


async def test_a_port_in_use_is_reported_with_its_host() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{HOST}:{port}"):
            await WireServer(HOST, port, max_message_bytes=MOST_BYTES).start()


async def test_two_servers_never_share_a_port(scripted: ScriptedServer) -> None:
    with pytest.raises(ConfigurationError, match=f"{HOST}:{scripted.port}"):
        await WireServer(HOST, scripted.port, max_message_bytes=MOST_BYTES).start()


async def test_a_server_may_be_stopped_before_it_started_and_twice() -> None:
    server = WireServer(HOST, 0, max_message_bytes=MOST_BYTES)
    await server.stop(0.0)
    await server.start()
    await server.stop(0.0)
    await server.stop(0.0)


# --- refused messages ----------------------------------------------------------------------------

UNKNOWN = b"\xf8\x07\x01"  # field 127, varint 1


def nested(outer: bytes, inner: bytes) -> bytes:
    """`inner` as a length-delimited field of tag `outer`."""
    return outer + bytes([len(inner)]) + inner


WRONG_TEXT = nested(b"\x1a", b"\xff\xfe")  # not UTF-8
UNREADABLE = {"garbage": b"\xff\xff\xff", "cut short": b"\x0a\x05ab", "groups without end": b"\x0b" * 200}
NESTED_TEXTS = {
    "Open": nested(b"\x0a", b"\x0a\x02\xff\xfe"),  # rows[0].sequence_id
    "Step": nested(b"\x6a", nested(b"\x12", WRONG_TEXT)),  # details[0].start.cache_salt
}


@pytest.mark.parametrize(
    ("method", "data"),
    [
        pytest.param(method, data, id=f"{method}-{name}")
        for method, text in NESTED_TEXTS.items()
        for name, data in {**UNREADABLE, "invalid UTF-8 in a nested string": text}.items()
    ],
)
async def test_unreadable_bytes_are_refused_and_the_next_call_works(
    scripted: ScriptedServer, channel: grpc.aio.Channel, target: GrpcTarget, data: bytes, method: str
) -> None:
    error = await refusal(channel, f"{TARGET}/{method}", data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{len(data)} bytes" in (error.details() or "")
    assert not scripted.target.steps
    assert not scripted.target.opens
    assert await target.step(BATCH) == RESULT


@pytest.mark.parametrize(
    ("data", "where"),
    [
        pytest.param(UNKNOWN, "field 127", id="at the top"),
        pytest.param(nested(b"\x6a", UNKNOWN), "details[0]", id="in the details of a row"),
        pytest.param(nested(b"\x6a", b"") + nested(b"\x6a", UNKNOWN), "details[1]", id="in those of the second"),
        pytest.param(nested(b"\x6a", nested(b"\x12", UNKNOWN)), "details[0].start", id="in a row's start"),
        pytest.param(
            nested(b"\x6a", nested(b"\x12", nested(b"\x12", nested(b"\x42", UNKNOWN)))),
            "details[0].start.sampling.logit_bias[0]",
            id="four deep",
        ),
    ],
)
async def test_an_unknown_field_is_refused_at_any_depth(
    scripted: ScriptedServer, channel: grpc.aio.Channel, data: bytes, where: str
) -> None:
    error = await refusal(channel, f"{TARGET}/Step", data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert where in (error.details() or "")
    assert "field 127" in (error.details() or "")
    assert not scripted.target.steps


@pytest.mark.parametrize("data", [b"\xff\xff\xff", nested(b"\x1a", b"\xff\xfe"), UNKNOWN])
async def test_a_streaming_method_refuses_unreadable_messages_before_its_servicer_runs(
    scripted: ScriptedServer, channel: grpc.aio.Channel, client: GenerationClient, data: bytes
) -> None:
    error = await refusal(channel, f"{GENERATION}/Generate", data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert scripted.generator.calls == 0
    assert await words(client) == ["a", "b"]


async def test_an_unknown_field_among_many_messages_is_refused_after_a_bounded_search(
    channel: grpc.aio.Channel,
) -> None:
    crowd = b"\x6a\x00" * (MOST_BYTES // 2 - 8)
    error = await refusal(channel, f"{TARGET}/Step", crowd + nested(b"\x6a", UNKNOWN))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith("message: ")  # not `details[32760]`: the search ended before


async def test_a_message_over_the_bound_is_refused_and_the_next_one_works(
    scripted: ScriptedServer, client: GenerationClient
) -> None:
    with pytest.raises(TooLarge, match=str(MOST_BYTES)):
        await anext(client.generate(Request(text="x" * MOST_BYTES), TIMEOUT_SECONDS))
    assert scripted.generator.calls == 0
    assert await words(client) == ["a", "b"]


async def test_a_step_over_the_bound_is_refused_and_the_next_one_works(
    scripted: ScriptedServer, target: GrpcTarget
) -> None:
    long = VerifyRow(SequenceId("s"), MOST_BYTES, (1,) * MOST_BYTES)
    with pytest.raises(TooLarge, match=str(MOST_BYTES)):
        await target.step(StepBatch((long,)))
    assert await target.step(BATCH) == RESULT


async def test_a_method_that_is_unsupported_is_unimplemented(channel: grpc.aio.Channel) -> None:
    error = await refusal(channel, f"{TARGET}/Fork", b"")
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


# --- errors -------------------------------------------------------------------------------------

ERRORS = [
    (InvalidRequest("sampling.temperature", -1.0, "between 0 and 2"), grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidRequest("prompt", 'words "in quotes" — ünïcode\n', "shorter"), grpc.StatusCode.INVALID_ARGUMENT),
    (UnsupportedParameter("best_of", 3), grpc.StatusCode.INVALID_ARGUMENT),
    (ContextLengthExceeded.of_prompt("prompt", 9, 7, "it holds 8"), grpc.StatusCode.INVALID_ARGUMENT),
    (ContextLengthExceeded.of_answer("max_tokens", 9, 8), grpc.StatusCode.INVALID_ARGUMENT),
    (TooLarge("body", "9 bytes", "at most 8 bytes"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnknownModel("model", "x" * 200, "a served model: tiny"), grpc.StatusCode.NOT_FOUND),
    (Overloaded("the queue is full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (KvPoolExhausted("no free block"), grpc.StatusCode.UNAVAILABLE),
    (NotReady("draining"), grpc.StatusCode.UNAVAILABLE),
    (TargetUnavailable("gone"), grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (Aborted("stopped"), grpc.StatusCode.CANCELLED),
]
by_class = pytest.mark.parametrize(("error", "code"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])


@by_class
async def test_an_error_has_its_status(error: PilotfishError, code: grpc.StatusCode) -> None:
    assert to_status(error)[:2] == (code, str(error))


@by_class
@pytest.mark.parametrize("said", [[], ["a"]], ids=["at first", "after a word"])
async def test_an_error_is_raised_at_the_client_as_at_the_server(
    scripted: ScriptedServer, client: GenerationClient, error: PilotfishError, code: grpc.StatusCode, said: list[str]
) -> None:
    scripted.generator.words, scripted.generator.failure = said, error
    received: list[str] = []
    with pytest.raises(type(error)) as caught:
        await words(client, received)
    assert (type(caught.value), str(caught.value), received) == (type(error), str(error), said)
    if isinstance(error, InvalidRequest) and isinstance(caught.value, InvalidRequest):
        assert (caught.value.field, caught.value.bound) == (error.field, error.bound)
    if isinstance(error, Overloaded) and isinstance(caught.value, Overloaded):
        assert caught.value.retry_after_seconds == error.retry_after_seconds
    scripted.generator.failure = None
    assert await words(client) == said


@pytest.mark.parametrize(
    ("failure", "seconds"),
    [
        (Overloaded("the queue is full", 3.0), "3"),
        (KvPoolExhausted("no free block"), "1"),
        (NotReady("draining"), "1"),
        (TargetUnavailable("gone"), "1"),
        (InvalidRequest("prompt", "", "longer"), None),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_error_reports_when_to_retry(
    scripted: ScriptedServer, channel: grpc.aio.Channel, failure: PilotfishError, seconds: str | None
) -> None:
    scripted.target.failure = failure
    error = await refusal(channel, f"{TARGET}/Step", b"")
    assert dict(error.trailing_metadata()).get("retry-after") == seconds


@pytest.mark.parametrize("length", [10_000, 100_000])
async def test_a_long_error_keeps_its_class(scripted: ScriptedServer, client: GenerationClient, length: int) -> None:
    scripted.generator.failure = NotReady("é" * length)
    with pytest.raises(NotReady, match="éé"):
        await words(client)


@pytest.mark.parametrize("unexpected", [ZeroDivisionError, NotImplementedError])
@pytest.mark.parametrize("method", [f"{TARGET}/Open", f"{TARGET}/Step", f"{GENERATION}/Generate"])
async def test_an_unexpected_error_is_logged_and_not_sent_to_the_client(
    scripted: ScriptedServer,
    channel: grpc.aio.Channel,
    target: GrpcTarget,
    caplog: pytest.LogCaptureFixture,
    method: str,
    unexpected: type[Exception],
) -> None:
    scripted.target.failure = scripted.generator.failure = unexpected("secret")
    scripted.generator.words = []
    with caplog.at_level(logging.ERROR):
        error = await refusal(channel, method, b"")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert any(record.exc_info and record.exc_info[0] is unexpected for record in caplog.records)
    scripted.target.failure = None
    assert await target.step(BATCH) == RESULT
