"""The clients of drafter and target on real sockets: what they return and what they raise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest

from cluster.core.errors import (
    DrafterUnavailable,
    InvalidRequest,
    NotReady,
    Overloaded,
    PilotfishError,
    TargetUnavailable,
)
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.verification import StepResult, Verdict
from cluster.wire.connection import Resolve, fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from tests.support.fakes.fake_cluster import until
from tests.support.fakes.wire_servers import (
    BATCH,
    HOST,
    INFO,
    OPENED,
    OPENS,
    PROPOSALS,
    RESULT,
    ROWS,
    TIMEOUT_SECONDS,
    ScriptedServer,
    words,
)
from tests.support.fakes.wire_servers import channel as channel
from tests.support.fakes.wire_servers import client as client
from tests.support.fakes.wire_servers import drafter as drafter
from tests.support.fakes.wire_servers import scripted as scripted
from tests.support.fakes.wire_servers import target as target


async def test_the_target_client_calls_every_method(scripted: ScriptedServer, target: GrpcTarget) -> None:
    assert await target.open(OPENS) == OPENED
    assert await target.step(BATCH) == RESULT
    await target.release([SequenceId("s"), SequenceId("t")])
    assert await target.info() == INFO
    assert (scripted.target.opens, scripted.target.steps, scripted.target.released) == ([OPENS], [BATCH], ("s", "t"))
    assert scripted.resolved == 1


async def test_successive_steps_use_one_stream(scripted: ScriptedServer, target: GrpcTarget) -> None:
    for _ in range(3):
        assert await target.step(BATCH) == RESULT
        assert scripted.target.streams == 1


async def test_concurrent_calls_have_their_own_streams_which_later_calls_reuse(
    scripted: ScriptedServer, drafter: GrpcDrafter
) -> None:
    for _ in range(2):
        scripted.drafter.hold.clear()
        calls = [asyncio.create_task(drafter.propose(ROWS, TIMEOUT_SECONDS)) for _ in range(3)]
        await until(lambda: scripted.drafter.streams == 3)
        scripted.drafter.hold.set()
        assert await asyncio.gather(*calls) == [PROPOSALS] * 3
        assert scripted.drafter.streams == 3


async def test_a_stream_that_failed_or_was_cancelled_is_not_reused(
    scripted: ScriptedServer, target: GrpcTarget
) -> None:
    scripted.target.failure = InvalidRequest("rows", 1, "less")
    with pytest.raises(InvalidRequest):
        await target.step(BATCH)
    scripted.target.failure = None
    assert await target.step(BATCH) == RESULT
    scripted.target.hold.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await target.step(BATCH)
    scripted.target.hold.set()
    assert await target.step(BATCH) == RESULT
    async with asyncio.timeout(30):
        await until(lambda: scripted.target.streams == 1)  # the cancelled stream ends at the server too


async def test_closing_ends_the_streams(scripted: ScriptedServer) -> None:
    target = GrpcTarget(scripted.resolve)
    await target.step(BATCH)
    assert scripted.target.streams == 1
    await target.close()
    async with asyncio.timeout(30):
        await until(lambda: not scripted.target.streams)


async def test_a_target_whose_answer_is_out_of_bounds_is_unavailable(
    scripted: ScriptedServer, target: GrpcTarget
) -> None:
    scripted.target.result = StepResult((Verdict(SequenceId("s"), 2, (3, 4, 5), 1),), KvOccupancy(8, 7))
    with pytest.raises(TargetUnavailable, match=r"token_counts\[0\]"):
        await target.step(BATCH)


class UnreadableServer(grpc.GenericRpcHandler):
    """Answers every call with bytes that are not a message."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def unary(request: bytes, context: object) -> bytes:
            return b"\xff\xff\xff"

        async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
            yield b"\xff\xff\xff"

        async def conversation(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield b"\xff\xff\xff"

        if handler_call_details.method.endswith("/Generate"):
            return grpc.unary_stream_rpc_method_handler(stream)
        if handler_call_details.method.endswith(("/Step", "/Propose")):
            return grpc.stream_stream_rpc_method_handler(conversation)
        return grpc.unary_unary_rpc_method_handler(unary)


@pytest.fixture
async def unreadable() -> AsyncIterator[Resolve]:
    server = grpc.aio.server(handlers=(UnreadableServer(),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()

    async def resolve() -> str:
        return f"{HOST}:{port}"

    yield resolve
    await server.stop(0)


async def test_a_peer_that_answers_with_unreadable_bytes_is_unavailable(unreadable: Resolve) -> None:
    target, drafter, client = GrpcTarget(unreadable), GrpcDrafter(unreadable), GenerationClient(unreadable)
    for call in (lambda: target.open(OPENS), lambda: target.step(BATCH), lambda: target.info()):
        with pytest.raises(TargetUnavailable):
            await call()
    with pytest.raises(DrafterUnavailable):
        await drafter.propose(ROWS, TIMEOUT_SECONDS)
    for ask in (lambda: client.abort("r"), lambda: client.get_model("m"), lambda: words(client)):
        with pytest.raises(PilotfishError):
            await ask()
    assert not await client.is_ready()
    await asyncio.gather(target.close(), drafter.close(), client.close())


async def test_a_drafter_that_is_late_is_unavailable_and_the_next_call_works(
    scripted: ScriptedServer, drafter: GrpcDrafter
) -> None:
    scripted.drafter.hold.clear()
    with pytest.raises(DrafterUnavailable):
        await drafter.propose(ROWS, 0.05)
    scripted.drafter.hold.set()
    assert await drafter.propose(ROWS, TIMEOUT_SECONDS) == PROPOSALS


@pytest.mark.parametrize(
    "failure", [InvalidRequest("rows", 1, "less"), NotReady("loading"), Overloaded("full"), ValueError("bug")]
)
async def test_every_error_of_a_drafter_is_drafter_unavailable(
    scripted: ScriptedServer, drafter: GrpcDrafter, failure: Exception
) -> None:
    scripted.drafter.failure = failure
    with pytest.raises(DrafterUnavailable) as caught:
        await drafter.propose(ROWS, TIMEOUT_SECONDS)
    assert not caught.value.had_call


async def test_a_drafter_is_lost_with_a_call_only_if_it_had_received_it(scripted: ScriptedServer) -> None:
    """A process that died is told from one that starts again and cannot be reached yet."""
    links: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(HOST, scripted.port)
        links.extend([writer, requests])
        await asyncio.gather(_copy(reader, requests), _copy(answers, writer))

    server = await asyncio.start_server(forward, HOST, 0)
    drafter = GrpcDrafter(fixed_address(f"{HOST}:{server.sockets[0].getsockname()[1]}"))
    for is_first in (True, False):
        if not is_first:  # on a stream that an earlier call has opened
            scripted.drafter.hold.set()
            assert await drafter.propose(ROWS, TIMEOUT_SECONDS) == PROPOSALS
        scripted.drafter.hold.clear()
        scripted.drafter.requested.clear()
        call = asyncio.create_task(drafter.propose(ROWS, TIMEOUT_SECONDS))
        await scripted.drafter.requested.wait()
        while links:
            links.pop().transport.abort()
        with pytest.raises(DrafterUnavailable) as caught:
            await call
        assert caught.value.had_call
    server.close()
    with pytest.raises(DrafterUnavailable) as caught:
        await drafter.propose(ROWS, TIMEOUT_SECONDS)
    assert not caught.value.had_call
    scripted.drafter.hold.set()
    await drafter.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)


async def test_a_target_that_is_late_is_unavailable(scripted: ScriptedServer) -> None:
    scripted.target.hold.clear()
    target = GrpcTarget(scripted.resolve, step_timeout_seconds=0.05)
    with pytest.raises(TargetUnavailable):
        await target.step(BATCH)
    await target.close()
