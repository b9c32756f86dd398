"""Clients of one worker cannot touch each other's sequences, and a client that has died holds nothing for long."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import DraftBudget, DraftRow, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.verification import OpenResult, OpenRow, StepBatch, VerifyRow
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.target_client import GrpcTarget
from pilotfish.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.support.fakes.echo_workers import draft_row, open_row, until, verify_row
from tests.support.fakes.fake_cluster import configure, request, tokens_of
from workers.draft.ngram import NgramDrafter, NgramSettings
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.draft_servicer import DraftServicer
from workers.serve.lease_servicer import Leases
from workers.serve.target_servicer import TargetServicer
from workers.serve.worker_server import DRAFT_SERVICE, TARGET_SERVICE, WorkerHost
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine

BLOCKS = 40
LEASE_SECONDS = 2.0
TIMEOUT_SECONDS = 120.0
A = SequenceId("a")


class Engine(TargetEngine):
    """Counts the openings of every sequence."""

    def __init__(self, directory: Path) -> None:
        model = load_model(ModelSection(path=str(directory), device="cpu"))
        super().__init__(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=BLOCKS), LocalDecider())
        self.opened: list[SequenceId] = []

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        self.opened += [row.sequence_id for row in rows]
        return super().open(rows)


class Watched(Leases):
    """Leases by a clock that the test turns."""

    def __init__(self) -> None:
        super().__init__(LEASE_SECONDS, lambda: self.now)
        self.now = 0.0
        self.calls = 0

    @contextmanager
    def call(self, client: str) -> Iterator[None]:
        with super().call(client):
            yield
        self.calls += 1


@pytest.fixture
def leases() -> Watched:
    return Watched()


@pytest.fixture
def engine(directory: Path) -> Engine:
    return Engine(directory)


@pytest.fixture
async def address(engine: Engine, leases: Watched) -> AsyncIterator[str]:
    add = target_pb2_grpc.add_TargetServiceServicer_to_server
    async with asyncio.timeout(TIMEOUT_SECONDS):
        async with WorkerHost("127.0.0.1", TARGET_SERVICE, TargetServicer(engine, leases), add) as host:
            yield host.address


@asynccontextmanager
async def client_of(address: str, lease_seconds: float = 3600.0) -> AsyncIterator[GrpcTarget]:
    target = GrpcTarget(fixed_address(address), lease_seconds=lease_seconds)
    yield target
    await target.close()


def following(token: int, base_len: int) -> VerifyRow:
    """The row after the stored tokens of the sequence `a`."""
    return VerifyRow(A, base_len, (token,))


async def free_blocks(target: GrpcTarget) -> int:
    return (await target.info()).kv.blocks_free


async def test_equal_ids_of_two_clients_are_two_sequences(address: str, engine: Engine) -> None:
    async with client_of(address) as one, client_of(address) as two:
        first = await one.step(StepBatch((verify_row("a", 5, 6, 7),)))
        other = await two.step(StepBatch((verify_row("a", 8, 9, 10, 11, 12),)))
        assert (await one.step(StepBatch((verify_row("a", 5, 6, 7),)))).verdicts == first.verdicts
        assert first.verdicts[0].sequence_id == other.verdicts[0].sequence_id == A
        assert first.verdicts[0].tokens
        assert other.verdicts[0].tokens
        assert await free_blocks(one) == BLOCKS - 1 - 2
        await two.release([A, SequenceId("b")])
        assert await free_blocks(one) == BLOCKS - 1
        await two.step(StepBatch((verify_row("c", 5),)))
        await two.release_all()
        assert await free_blocks(one) == BLOCKS - 1
        row = following(first.verdicts[0].tokens[0], 4)
        assert (await one.step(StepBatch((row,)))).verdicts[0].fault is None


@pytest.mark.parametrize("theirs", ["{client}/a", "/a", "a"])
async def test_no_id_names_a_sequence_of_another_client(address: str, theirs: str) -> None:
    async with client_of(address) as one, client_of(address) as two:
        await one.step(StepBatch((verify_row("a", 5, 6, 7),)))
        name = theirs.format(client=one._lease.client)
        await two.release([SequenceId(name)])
        opened = await two.open([open_row("mine", 5, 6, 7, 8, parent=name)])
        assert opened.stored_lens == (0,)
        assert await free_blocks(one) < BLOCKS


async def test_the_sequences_of_a_silent_client_are_freed_and_those_of_another_are_kept(
    address: str, leases: Watched
) -> None:
    async with client_of(address) as silent, client_of(address) as active:
        await silent.step(StepBatch((verify_row("a", 5, 6, 7, 8, 9),)))
        first = (await active.step(StepBatch((verify_row("a", 5, 6, 7),)))).verdicts[0]
        leases.now += 0.75 * LEASE_SECONDS
        follower = following(first.tokens[0], 4)
        await active.step(StepBatch((follower,)))
        leases.now += 0.5 * LEASE_SECONDS
        while await free_blocks(active) < BLOCKS - 1:  # noqa: ASYNC110 - the worker frees in its own time
            await asyncio.sleep(0.01)
        assert (await active.step(StepBatch((follower,)))).verdicts[0].fault is None
        lost = (await silent.step(StepBatch((following(10, 6),)))).verdicts[0]
        assert lost.fault is not None
        assert lost.fault.code is RowFaultCode.OUT_OF_SYNC


async def test_an_idle_client_renews_its_lease(address: str, leases: Watched) -> None:
    async with client_of(address, lease_seconds=0.1) as idle, client_of(address) as watching:
        await idle.step(StepBatch((verify_row("a", 5, 6, 7),)))
        for _ in range(3):
            seen = leases.calls
            leases.now += 0.75 * LEASE_SECONDS
            await until(lambda seen=seen: leases.calls > seen)  # type: ignore[misc]
        assert leases.now > 2 * LEASE_SECONDS
        assert await free_blocks(watching) == BLOCKS - 1


HOLDER = """
import asyncio, sys
from cluster.core.verification import StepBatch
from cluster.wire.target_client import GrpcTarget
from cluster.wire.connection import fixed_address
from tests.support.fakes.echo_workers import verify_row
async def hold():
    target = GrpcTarget(fixed_address(sys.argv[1]), lease_seconds=0.1)
    await target.step(StepBatch((verify_row("a", 5, 6, 7, 8, 9), verify_row("b", 5))))
    print("stored", flush=True)
    await asyncio.sleep(600)
asyncio.run(hold())
"""


async def test_memory_is_back_to_its_start_after_a_holder_was_killed(address: str, leases: Watched) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"stored\n"
    async with client_of(address) as watching:
        assert await free_blocks(watching) < BLOCKS
        process.kill()
        await process.wait()
        assert await free_blocks(watching) < BLOCKS
        leases.now += 2 * LEASE_SECONDS
        while await free_blocks(watching) < BLOCKS:
            leases.now += 2 * LEASE_SECONDS  # a renewal of the dead client may have been under way
            await asyncio.sleep(0.01)
        assert leases.expire() == ()


async def test_a_second_coordinator_frees_nothing_of_the_first(address: str, engine: Engine) -> None:
    wishes = [request(f"r{number}", prompt=range(5, 9 + number), max_tokens=24) for number in range(3)]

    async def write(meanwhile: Callable[[], object] = lambda: None) -> list[tuple[int, ...]]:
        async with client_of(address) as target, Coordinator(target, [], configure(), Metrics()) as coordinator:
            writing = [asyncio.ensure_future(tokens_of(coordinator, wish)) for wish in wishes]
            await until(lambda: len(engine.opened) >= len(wishes))
            meanwhile()
            return [tuple(tokens) for tokens in await asyncio.gather(*writing)]

    alone = await write()
    engine.opened.clear()
    second: list[asyncio.Task[list[tuple[int, ...]]]] = []
    assert await write(lambda: second.append(asyncio.ensure_future(write()))) == alone
    assert await second[0] == alone
    assert len(engine.opened) == len(set(engine.opened)) == 2 * len(wishes)


async def test_a_drafter_frees_what_a_silent_client_stored(leases: Watched) -> None:
    method = NgramDrafter(NgramSettings(), DraftSection())
    add = draft_pb2_grpc.add_DraftServiceServicer_to_server
    async with WorkerHost("127.0.0.1", DRAFT_SERVICE, DraftServicer(method, leases), add) as host:
        one, two = (GrpcDrafter(fixed_address(host.address), lease_seconds=3600.0) for _ in range(2))
        repeated = (5, 6, 7, 5, 6)
        for drafter in (one, two):
            (proposal,) = await drafter.propose([draft_row("a", *repeated)], TIMEOUT_SECONDS)
            assert proposal.fault is None
        leases.now += 0.75 * LEASE_SECONDS
        await two.propose([draft_row("a", *repeated)], TIMEOUT_SECONDS)
        leases.now += 0.5 * LEASE_SECONDS
        await until(lambda: not leases.has_expired)
        (lost,) = await one.propose([DraftRow(A, 6, (7,), DraftBudget(4, 4))], TIMEOUT_SECONDS)
        (kept,) = await two.propose([DraftRow(A, 6, (7,), DraftBudget(4, 4))], TIMEOUT_SECONDS)
        assert lost.fault is not None
        assert lost.fault.code is RowFaultCode.OUT_OF_SYNC
        assert kept.fault is None
        await one.close()
        await two.close()
