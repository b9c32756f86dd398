"""The clients on real sockets: what they raise, what they free, whom they find again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing

import grpc
import pytest

from cluster.core.errors import (
    DeadlineExceeded,
    DrafterUnavailable,
    InvalidRequest,
    NotReady,
    Overloaded,
    PilotfishError,
    TargetUnavailable,
    UnknownModel,
)
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.verification import StepResult, Verdict
from cluster.wire.connection import Resolve
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from tests.support.wire_servers import (
    BATCH,
    GENERATION,
    HOST,
    INFO,
    OPENED,
    OPENS,
    PATIENCE,
    PROPOSALS,
    RESULT,
    ROWS,
    House,
    Request,
    words,
)
from tests.support.wire_servers import channel as channel
from tests.support.wire_servers import client as client
from tests.support.wire_servers import drafter as drafter
from tests.support.wire_servers import house as house
from tests.support.wire_servers import target as target


async def test_the_target_opens_steps_releases_and_tells_what_it_is(house: House, target: GrpcTarget) -> None:
    assert await target.open(OPENS) == OPENED
    assert await target.step(BATCH) == RESULT
    await target.release([SequenceId("s"), SequenceId("t")])
    assert await target.info() == INFO
    assert (house.target.opens, house.target.steps, house.target.released) == ([OPENS], [BATCH], ("s", "t"))
    assert house.resolved == 1


async def test_the_drafter_proposes(drafter: GrpcDrafter) -> None:
    assert await drafter.propose(ROWS, PATIENCE) == PROPOSALS


async def test_step_after_step_goes_through_one_stream(house: House, target: GrpcTarget) -> None:
    for _ in range(3):
        assert await target.step(BATCH) == RESULT
        assert house.target.streams == 1


async def test_calls_at_one_time_have_a_stream_each_and_leave_them_to_others(
    house: House, drafter: GrpcDrafter
) -> None:
    for _ in range(2):
        house.drafter.hold.clear()
        calls = [asyncio.create_task(drafter.propose(ROWS, PATIENCE)) for _ in range(3)]
        while house.drafter.streams < 3:  # noqa: ASYNC110 - the servicer tells nobody
            await asyncio.sleep(0.001)
        house.drafter.hold.set()
        assert await asyncio.gather(*calls) == [PROPOSALS] * 3
        assert house.drafter.streams == 3


async def test_a_stream_that_failed_or_was_given_up_is_not_used_again(house: House, target: GrpcTarget) -> None:
    house.target.failure = InvalidRequest("rows", 1, "less")
    with pytest.raises(InvalidRequest):
        await target.step(BATCH)
    house.target.failure = None
    assert await target.step(BATCH) == RESULT
    house.target.hold.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await target.step(BATCH)
    house.target.hold.set()
    assert await target.step(BATCH) == RESULT
    while house.target.streams > 1:  # noqa: ASYNC110 - the one that was given up ends on the other side, too
        await asyncio.sleep(0.001)


async def test_closing_ends_the_streams(house: House) -> None:
    target = GrpcTarget(house.resolve)
    await target.step(BATCH)
    await target.close()
    while house.target.streams:  # noqa: ASYNC110 - the servicer tells nobody
        await asyncio.sleep(0.001)


async def test_a_server_that_stops_does_not_wait_for_who_asks_nothing(house: House, target: GrpcTarget) -> None:
    assert await target.step(BATCH) == RESULT
    old = house.server
    await house.open()
    async with asyncio.timeout(PATIENCE):
        await old.stop(3 * PATIENCE)
    assert not house.target.streams


async def test_a_target_that_refuses_a_batch_is_heard(house: House, target: GrpcTarget) -> None:
    house.target.failure = InvalidRequest("rows[0].pending", 5, "less")
    with pytest.raises(InvalidRequest, match=r"rows\[0\]\.pending"):
        await target.step(BATCH)


async def test_an_answer_out_of_bounds_is_a_fault_of_the_target(house: House, target: GrpcTarget) -> None:
    house.target.result = StepResult((Verdict(SequenceId("s"), 2, (3, 4, 5), 1),), KvOccupancy(8, 7))
    with pytest.raises(TargetUnavailable, match=r"verdicts\[0\]\.tokens"):
        await target.step(BATCH)


class Babbler(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

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
async def babbling() -> AsyncIterator[Resolve]:
    server = grpc.aio.server(handlers=(Babbler(),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()

    async def resolve() -> str:
        return f"{HOST}:{port}"

    yield resolve
    await server.stop(0)


async def test_an_answer_that_is_no_message_is_a_fault_of_the_peer(babbling: Resolve) -> None:
    target, drafter, client = GrpcTarget(babbling), GrpcDrafter(babbling), GenerationClient(babbling)
    for call in (lambda: target.open(OPENS), lambda: target.step(BATCH), lambda: target.info()):
        with pytest.raises(TargetUnavailable):
            await call()
    with pytest.raises(DrafterUnavailable):
        await drafter.propose(ROWS, PATIENCE)
    for ask in (lambda: client.abort("r"), lambda: client.get_model("m"), lambda: words(client)):
        with pytest.raises(PilotfishError):
            await ask()
    assert not await client.is_ready()
    await asyncio.gather(target.close(), drafter.close(), client.close())


async def test_a_drafter_that_is_late_is_unavailable_and_the_next_call_works(
    house: House, drafter: GrpcDrafter
) -> None:
    house.drafter.hold.clear()
    with pytest.raises(DrafterUnavailable):
        await drafter.propose(ROWS, 0.05)
    house.drafter.hold.set()
    assert await drafter.propose(ROWS, PATIENCE) == PROPOSALS


@pytest.mark.parametrize(
    "failure", [InvalidRequest("rows", 1, "less"), NotReady("loading"), Overloaded("full"), ValueError("bug")]
)
async def test_whatever_ails_a_drafter_it_is_unavailable(
    house: House, drafter: GrpcDrafter, failure: Exception
) -> None:
    house.drafter.failure = failure
    with pytest.raises(DrafterUnavailable):
        await drafter.propose(ROWS, PATIENCE)


async def test_a_target_that_is_late_is_unavailable(house: House) -> None:
    house.target.hold.clear()
    target = GrpcTarget(house.resolve, step_timeout_seconds=0.05)
    with pytest.raises(TargetUnavailable):
        await target.step(BATCH)
    await target.close()


async def test_the_deadline_of_a_stream_ends_it_on_both_sides(house: House, client: GenerationClient) -> None:
    house.generator.wait = True
    heard: list[str] = []
    with pytest.raises(DeadlineExceeded):
        await words(client, heard, timeout_seconds=0.2)
    assert heard == ["a", "b"]
    await house.generator.freed.wait()


async def test_leaving_the_iterator_frees_the_answer(house: House, client: GenerationClient) -> None:
    house.generator.wait = True
    async with aclosing(client.generate(Request(text="hi"), PATIENCE)) as responses:
        await anext(responses)
        assert not house.generator.freed.is_set()
    await house.generator.freed.wait()


async def test_a_cancelled_reader_frees_the_answer(house: House, client: GenerationClient) -> None:
    house.generator.wait = True
    reading = asyncio.create_task(words(client))
    await house.generator.asked.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await house.generator.freed.wait()


async def test_a_reader_that_stops_reading_and_leaves_frees_the_answer(house: House, client: GenerationClient) -> None:
    house.generator.words = ["x" * 60_000] * 1000  # more than the connection holds: the servicer waits to write
    async with aclosing(client.generate(Request(text="hi"), PATIENCE)) as responses:
        await anext(responses)
        await asyncio.sleep(0.05)
        assert not house.generator.freed.is_set()
    await house.generator.freed.wait()


@pytest.mark.parametrize(
    ("make", "ask", "unavailable"),
    [
        (GrpcTarget, lambda client: client.info(), TargetUnavailable),
        (GrpcTarget, lambda client: client.step(BATCH), TargetUnavailable),
        (GrpcDrafter, lambda client: client.propose(ROWS, PATIENCE), DrafterUnavailable),
        (GenerationClient, lambda client: client.list_models(), PilotfishError),
    ],
    ids=["target", "steps", "drafter", "generation"],
)
async def test_a_server_that_moved_to_another_port_is_found_there(
    house: House, make: Callable[[Resolve], GrpcTarget], ask: Callable[[object], object], unavailable: type[Exception]
) -> None:
    client = make(house.resolve)
    first = await ask(client)  # type: ignore[misc]
    await house.move()
    try:
        again = await ask(client)  # type: ignore[misc]
    except unavailable:  # one call may be lost: nobody repeats it unasked
        again = await ask(client)  # type: ignore[misc]
    assert again == first
    assert house.resolved == 2
    await client.close()


async def test_an_answer_under_way_outlives_the_loss_of_another_call(house: House, client: GenerationClient) -> None:
    """A server that says UNAVAILABLE to one call makes the client connect anew; the others go on."""
    house.generator.wait = True
    async with aclosing(client.generate(Request(text="hi"), PATIENCE)) as running:
        await anext(running)
        house.generator.words, house.generator.failure = [], NotReady("full of something")
        with pytest.raises(NotReady):
            await words(client)
        house.generator.failure = None
        assert (await client.list_models())[0].id == "tiny"
        assert (await anext(running)).delta.text == "b"


async def test_nobody_there_is_unavailable_at_once() -> None:
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


async def test_a_proxy_for_the_outside_world_is_not_asked(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    target = GrpcTarget(house.resolve)
    assert await target.info() == INFO
    await target.close()


async def test_the_public_client_passes_everything_through(house: House, client: GenerationClient) -> None:
    assert await client.abort("running")
    assert not await client.abort("nobody")
    assert await client.metrics() == (b"one 1\n", "text/plain")
    with pytest.raises(UnknownModel) as unknown:
        await client.get_model("x")
    assert unknown.value.field == "model"
    assert not await client.is_ready()
    await house.server.set_serving(GENERATION, True)
    assert await client.is_ready()


async def test_stopping_lets_a_running_answer_end_within_the_grace(house: House, client: GenerationClient) -> None:
    house.target.hold.clear()
    async with AsyncExitStack() as stack:
        target = GrpcTarget(house.resolve)
        stack.push_async_callback(target.close)
        step = asyncio.create_task(target.step(BATCH))
        await target.info()
        stopping = asyncio.create_task(house.server.stop(PATIENCE))
        await asyncio.sleep(0)
        house.target.hold.set()
        assert await step == RESULT
        await stopping
