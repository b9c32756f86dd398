"""Connections on real sockets: servers that move, stop or are absent."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from random import Random

import grpc
import psutil
import pytest

from cluster.core.errors import (
    DrafterUnavailable,
    NotReady,
    PilotfishError,
    TargetUnavailable,
)
from cluster.wire.channel import open_channel
from cluster.wire.connection import Connection, Resolve, fixed_address
from cluster.wire.coordinator_client import CoordinatorClient
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.server import WireServer
from cluster.wire.target_client import GrpcTarget
from tests.support.clusters.faulty_link import FaultyLink
from tests.support.fakes.wire_servers import (
    BATCH,
    HOST,
    INFO,
    OPENS,
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


async def test_a_stopping_server_does_not_wait_for_idle_streams(scripted: ScriptedServer, target: GrpcTarget) -> None:
    assert await target.step(BATCH) == RESULT
    old = scripted.server
    await scripted.open()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await old.stop(3 * TIMEOUT_SECONDS)
    assert not scripted.target.streams


@pytest.mark.parametrize(
    ("make", "ask", "unavailable"),
    [
        (GrpcTarget, lambda client: client.info(), TargetUnavailable),
        (GrpcTarget, lambda client: client.step(BATCH), TargetUnavailable),
        (GrpcDrafter, lambda client: client.propose(ROWS, TIMEOUT_SECONDS), DrafterUnavailable),
        (GenerationClient, lambda client: client.list_models(), PilotfishError),
    ],
    ids=["target", "steps", "drafter", "generation"],
)
async def test_a_server_that_moved_to_another_port_is_found_there(
    scripted: ScriptedServer,
    make: Callable[[Resolve], GrpcTarget],
    ask: Callable[[object], object],
    unavailable: type[Exception],
) -> None:
    client = make(scripted.resolve)
    first = await ask(client)  # type: ignore[misc]
    await scripted.move()
    try:
        again = await ask(client)  # type: ignore[misc]
    except unavailable:  # one call may be lost: the client does not repeat calls
        again = await ask(client)  # type: ignore[misc]
    assert again == first
    assert scripted.resolved == 2
    await client.close()


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
async def test_a_channel_of_a_lost_server_is_closed_after_its_last_call(
    scripted: ScriptedServer, target: GrpcTarget
) -> None:
    scripted.target.hold.clear()
    running = asyncio.create_task(target.step(BATCH))
    await scripted.target.requested.wait()
    scripted.target.failure = TargetUnavailable("the worker has gone")
    for _ in range(8):
        with pytest.raises(TargetUnavailable):
            await target.open(OPENS)
    await _until_connections(scripted.port, 1)  # the step alone is left
    scripted.target.failure = None
    scripted.target.hold.set()
    assert await running == RESULT
    assert await target.step(BATCH) == RESULT
    await _until_connections(scripted.port, 1)
    scripted.target.failure = TargetUnavailable("the worker has gone")
    with pytest.raises(TargetUnavailable):
        await target.step(BATCH)
    await target.close()
    await _until_connections(scripted.port, 0)


async def test_a_call_of_a_lost_server_that_fails_late_keeps_the_channel_to_its_successor(
    scripted: ScriptedServer, target: GrpcTarget
) -> None:
    scripted.target.hold.clear()
    late = asyncio.create_task(target.step(BATCH))
    await scripted.target.requested.wait()
    scripted.target.failure = TargetUnavailable("the worker has gone")
    with pytest.raises(TargetUnavailable):
        await target.open(OPENS)
    await target.info()
    resolved = scripted.resolved
    scripted.target.hold.set()
    with pytest.raises(TargetUnavailable):
        await late
    scripted.target.failure = None
    assert await target.step(BATCH) == RESULT
    assert scripted.resolved == resolved == 2


@pytest.mark.usefixtures("_no_collector")
async def test_the_channel_of_a_lost_server_is_closed_after_its_last_call_when_its_client_was_closed_before(
    scripted: ScriptedServer, target: GrpcTarget
) -> None:
    scripted.target.hold.clear()
    running = asyncio.create_task(target.step(BATCH))
    await scripted.target.requested.wait()
    scripted.target.failure = TargetUnavailable("the worker has gone")
    with pytest.raises(TargetUnavailable):
        await target.open(OPENS)
    await target.close()
    scripted.target.failure = None
    scripted.target.hold.set()
    assert await running == RESULT
    await _until_connections(scripted.port, 0)


@pytest.mark.usefixtures("_no_collector")
async def test_kept_errors_of_a_refused_stream_keep_no_connection(scripted: ScriptedServer) -> None:
    async def nowhere() -> str:
        raise ConnectionError("no process serves")

    link = FaultyLink(nowhere, Random(1))
    address = await link.start()
    client = CoordinatorClient(fixed_address(address))
    errors = []
    for _ in range(8):
        # The status of the refusal, unless the call's first message was being sent when it came.
        with pytest.raises(NotReady, match=r"no process serves|lost while a message was sent") as caught:
            await words(client)
        errors.append(caught.value)
    await _until_connections(int(address.rpartition(":")[2]), 0)
    await client.close()
    await link.stop()
    assert len(errors) == 8


async def test_a_server_that_is_lost_while_a_message_is_sent_is_resolved_again(scripted: ScriptedServer) -> None:
    """gRPC has no status then, but an error of its own, which depends on what was being done."""
    connection = Connection(scripted.resolve, TargetUnavailable)
    channel = await connection.channel()
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
    )

    found = connection.failed(error, channel)

    assert isinstance(found, TargetUnavailable)
    assert str(found) == "the connection was lost while a message was sent"
    assert not connection.is_open(channel)
    assert await connection.channel() is not channel
    assert scripted.resolved == 2
    await connection.close()


async def _until_connections(port: int, number: int) -> None:
    """Wait until this process has `number` connections to a port. Raises `TimeoutError`."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while _connections(port) != number:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.02)


def _connections(port: int) -> int:
    peers = [one.raddr for one in psutil.Process().net_connections() if one.raddr]
    return sum(peer.port == port for peer in peers)


async def test_an_absent_server_is_unavailable_at_once() -> None:
    with socket.socket() as placeholder:
        placeholder.bind((HOST, 0))  # bound, but it does not listen

        async def resolve() -> str:
            return f"{HOST}:{placeholder.getsockname()[1]}"

        target, client = GrpcTarget(resolve), GenerationClient(resolve)
        with pytest.raises(TargetUnavailable):
            await target.info()
        with pytest.raises(PilotfishError):
            await client.list_models()
        assert not await client.is_ready()
        await asyncio.gather(target.close(), client.close())


async def test_a_server_that_starts_at_the_port_of_a_dead_one_is_reached_at_once() -> None:
    with socket.socket() as placeholder:
        placeholder.bind((HOST, 0))
        port = placeholder.getsockname()[1]

    async def resolve() -> str:
        return f"{HOST}:{port}"

    async with open_channel(await resolve()) as old:
        old.get_state(try_to_connect=True)
        await asyncio.sleep(1.5)  # it has tried several times, and waits longer now
        async with WireServer(HOST, port) as server:
            await server.start()
            client = GenerationClient(resolve)
            assert await client.is_reachable()
            await client.close()


async def test_an_http_proxy_of_the_environment_is_ignored(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    target = GrpcTarget(scripted.resolve)
    assert await target.info() == INFO
    await target.close()


async def test_a_stopping_server_lets_a_running_call_end(scripted: ScriptedServer, client: GenerationClient) -> None:
    scripted.target.hold.clear()
    async with AsyncExitStack() as stack:
        target = GrpcTarget(scripted.resolve)
        stack.push_async_callback(target.close)
        step = asyncio.create_task(target.step(BATCH))
        await scripted.target.requested.wait()
        stopping = asyncio.create_task(scripted.server.stop(TIMEOUT_SECONDS))
        await asyncio.sleep(0)
        scripted.target.hold.set()
        assert await step == RESULT
        await stopping
