"""The workers' doors: one thread computes, a bad row faults alone, and nobody's leaving breaks anything."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config import DraftSection, KvSection, ModelSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Proposal
from cluster.core.errors import ConfigurationError, DrafterUnavailable, InvalidRequest, NotReady, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    RowFaultCode,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec_draft import decode_proposals, encode_draft_rows
from cluster.wire.codec_target import decode_step_result, encode_step_batch
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.server import WireServer
from cluster.wire.target_client import GrpcTarget
from pilotfish.v1 import draft_pb2, draft_pb2_grpc, target_pb2_grpc
from tests.support import tiny
from workers.draft.ngram import NgramDrafter, NgramSettings
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve import actors
from workers.serve.draft_servicer import DraftServicer
from workers.serve.target_servicer import TargetServicer
from workers.serve.worker_server import host_target
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine

START = SequenceStart(1, SamplingParameters(temperature=0.0))
POISON = 666
KV = KvOccupancy(10, 4)


def draft_row(name: str, *tokens: int) -> DraftRow:
    return DraftRow(SequenceId(name), len(tokens), tokens, DraftBudget(4, 4), START)


def telling_row(name: str, *tokens: int) -> DraftRow:
    return replace(draft_row(name, *tokens), budget=NO_DRAFT)


def open_row(name: str, *tokens: int, parent: str | None = None) -> OpenRow:
    return OpenRow(SequenceId(name), tokens, START, None if parent is None else SequenceId(parent))


def verify_row(name: str, *tokens: int) -> VerifyRow:
    return VerifyRow(SequenceId(name), len(tokens), tokens, start=START)


class Gate:
    """Holds the computing thread until it is opened, and tells when it has arrived."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._arrived = threading.Event()

    def pass_through(self) -> None:
        self._arrived.set()
        assert self.opened.wait(10)

    async def reached(self) -> None:
        await asyncio.to_thread(self._arrived.wait, 10)


class EchoDrafter:
    """Guesses each row's last token; chokes on one of them."""

    def __init__(self, before: Callable[[], None] = lambda: None, growing: int = 0) -> None:
        self.before = before
        self.growing = growing
        """Passes that it still has to make between calls."""
        self.untold = 0
        """Pieces that it still has to learn."""
        self.calls: list[tuple[str, ...]] = []
        self.threads: set[int] = set()

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self._note("propose", *(row.sequence_id for row in rows))
        self.before()
        if any(POISON in row.new_tokens for row in rows):
            raise RuntimeError("choked")
        return tuple(Proposal(row.sequence_id, row.base_len, TokenTree.chain(row.new_tokens[-1:])) for row in rows)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        if self.untold < 1:
            return False
        self._note("catch_up", *sequence_ids)
        self.untold -= 1
        return True

    def run_ahead(self) -> bool:
        if self.growing < 1:
            return False
        self._note("run_ahead")
        self.growing -= 1
        return True

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._note("release", *sequence_ids)

    def _note(self, kind: str, *names: str) -> None:
        self.calls.append((kind, *(name.partition("/")[2] for name in names)))
        self.threads.add(threading.get_ident())


class EchoEngine:
    """Decides each row's last token again; chokes on one of them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.closed_by: list[str] = []

    def step(self, batch: StepBatch) -> StepResult:
        self.sizes.append(len(batch.rows))
        if any(POISON in row.pending for row in batch.rows):
            raise RuntimeError("choked")
        verdicts = tuple(Verdict(row.sequence_id, row.base_len, row.pending[-1:]) for row in batch.rows)
        return StepResult(verdicts, KV, 0.5)

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        return KvOccupancy(10, 4 + len(sequence_ids))

    def release_all(self) -> KvOccupancy:
        return KvOccupancy(10, 10)

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        raise InvalidRequest("parent", rows[0].parent, "a sequence that the target holds")

    def info(self) -> TargetInfo:
        return TargetInfo("echo", 700, 64, KvLayout(4), KV, (2,), 1, "float32", "e")

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def answer_to(method: Callable[[Any, Any], AsyncIterator[Any]], request: Any) -> Any:
    """One request of a stream, answered."""

    async def requests() -> AsyncIterator[Any]:
        yield request

    return await anext(method(requests(), None))


async def propose(servicer: DraftServicer, *rows: DraftRow, client: str = "") -> tuple[Proposal, ...]:
    return decode_proposals(await answer_to(servicer.Propose, encode_draft_rows(rows, client)))


async def release(servicer: DraftServicer, *names: str, client: str = "") -> None:
    request = draft_pb2.DraftServiceReleaseRequest(sequence_ids=names, client=client)
    await servicer.Release(request, None)  # type: ignore[arg-type]


async def step(servicer: TargetServicer, *rows: VerifyRow) -> StepResult:
    return decode_step_result(await answer_to(servicer.Step, encode_step_batch(StepBatch(rows))))


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
async def held(gate: Gate) -> AsyncIterator[tuple[DraftServicer, EchoDrafter]]:
    """A drafter that waits at the gate whenever it is asked for guesses."""
    method = EchoDrafter(gate.pass_through)
    servicer = DraftServicer(method)
    yield servicer, method
    gate.opened.set()
    await servicer.close()


@asynccontextmanager
async def drafter_at(servicer: DraftServicer) -> AsyncIterator[GrpcDrafter]:
    async with WireServer("127.0.0.1", 0) as server:
        server.add("pilotfish.v1.DraftService", draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer)
        port = await server.start()

        async def resolve() -> str:
            return f"127.0.0.1:{port}"

        drafter = GrpcDrafter(resolve)
        yield drafter
        await drafter.close()
    await servicer.close()


@asynccontextmanager
async def target_at(servicer: TargetServicer) -> AsyncIterator[GrpcTarget]:
    async with WireServer("127.0.0.1", 0) as server:
        server.add("pilotfish.v1.TargetService", target_pb2_grpc.add_TargetServiceServicer_to_server, servicer)
        port = await server.start()

        async def resolve() -> str:
            return f"127.0.0.1:{port}"

        target = GrpcTarget(resolve)
        yield target
        await target.close()
    await servicer.close()


# --- drafter ----------------------------------------------------------------------------------


async def test_proposals_cross_the_wire_as_the_method_made_them() -> None:
    rows = [draft_row("a", 1, 2, 3, 1, 2), draft_row("b", 1, 2), DraftRow(SequenceId("c"), 5, (1,), DraftBudget(1, 1))]
    async with drafter_at(DraftServicer(NgramDrafter(NgramSettings(), DraftSection()))) as drafter:
        assert await drafter.propose(rows, 10) == NgramDrafter(NgramSettings(), DraftSection()).propose(rows)
        await drafter.release([SequenceId("a")])
        forgotten = await drafter.propose([DraftRow(SequenceId("a"), 6, (3,), DraftBudget(1, 1))], 10)
        assert forgotten[0].fault is not None and forgotten[0].fault.code is RowFaultCode.OUT_OF_SYNC


async def test_two_rows_of_one_sequence_are_refused_before_anything_is_computed() -> None:
    method = EchoDrafter()
    async with drafter_at(DraftServicer(method)) as drafter:
        with pytest.raises(DrafterUnavailable, match=r"rows\[1\]\.sequence_id: 'a'"):
            await drafter.propose([draft_row("a", 1), draft_row("a", 1)], 10)
        assert method.calls == []


async def test_everything_is_computed_in_one_thread_that_is_not_the_event_loops() -> None:
    method = EchoDrafter()
    servicer = DraftServicer(method)
    await asyncio.gather(*(propose(servicer, draft_row(name, 1)) for name in "abcd"), release(servicer, "a"))
    await servicer.close()
    assert len(method.calls) == 5
    assert len(method.threads) == 1
    assert threading.get_ident() not in method.threads


async def test_a_row_that_makes_the_method_raise_faults_alone() -> None:
    servicer = DraftServicer(EchoDrafter())
    proposals = await propose(servicer, draft_row("a", 1), draft_row("b", POISON), draft_row("c", 3))
    await servicer.close()
    assert [proposal.tree.tokens for proposal in proposals] == [(1,), (), (3,)]
    assert [proposal.fault and proposal.fault.code for proposal in proposals] == [None, RowFaultCode.INVALID, None]


async def test_what_befalls_every_row_is_the_workers_own_failure_and_the_next_call_works() -> None:
    async with drafter_at(DraftServicer(EchoDrafter())) as drafter:
        with pytest.raises(DrafterUnavailable):
            await drafter.propose([draft_row("a", POISON), draft_row("b", POISON)], 10)
        assert (await drafter.propose([draft_row("a", 1)], 10))[0].tree == TokenTree.chain([1])


async def test_a_client_that_does_not_wait_leaves_the_computation_whole_and_asking_again_answers(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    async with drafter_at(servicer) as drafter:
        leaving = asyncio.create_task(drafter.propose([draft_row("a", 1)], 10))
        await gate.reached()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gate.opened.set()
        assert (await drafter.propose([draft_row("a", 1)], 10))[0].tree == TokenTree.chain([1])
    assert method.calls == [("propose", "a"), ("propose", "a")]


async def test_a_proposal_that_nobody_waits_for_any_more_is_not_begun(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("begun", 1)))
    await gate.reached()
    queued = asyncio.create_task(propose(servicer, draft_row("queued", 1)))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    gate.opened.set()
    await begun
    await propose(servicer, draft_row("last", 1))
    assert method.calls == [("propose", "begun"), ("propose", "last")]


async def test_a_release_is_done_even_if_nobody_waits_for_it(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("a", 1)))
    await gate.reached()
    freeing = asyncio.create_task(release(servicer, "a"))
    await asyncio.sleep(0)
    freeing.cancel()
    await asyncio.gather(freeing, return_exceptions=True)
    gate.opened.set()
    await begun
    await servicer.close()
    assert method.calls == [("propose", "a"), ("release", "a")]


async def test_a_failure_that_nobody_waits_for_is_logged(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, _ = held
    leaving = asyncio.create_task(propose(servicer, draft_row("a", POISON)))
    await gate.reached()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    with caplog.at_level(logging.ERROR):
        gate.opened.set()
        await servicer.close()
    assert "choked" in caplog.text


async def test_closing_finishes_what_is_under_way_and_refuses_what_comes_after(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("a", 1)))
    await gate.reached()
    closing = asyncio.create_task(servicer.close())
    await asyncio.sleep(0)
    with pytest.raises(NotReady):
        await propose(servicer, draft_row("b", 1))
    gate.opened.set()
    await closing
    await servicer.close()
    assert (await begun)[0].tree == TokenTree.chain([1])
    assert method.calls == [("propose", "a")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - growth tells nobody
            await asyncio.sleep(0.001)


async def test_between_calls_the_method_grows_until_there_is_nothing_left_to_grow() -> None:
    method = EchoDrafter(growing=3)
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("a", 1))
    await until(lambda: method.growing == 0)
    await servicer.close()
    assert method.calls == [("propose", "a"), *[("run_ahead",)] * 3]
    assert len(method.threads) == 1


async def test_a_call_that_only_tells_is_answered_once_its_sequences_are_learned() -> None:
    method = EchoDrafter()
    method.untold = 3
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("b", 1))  # wants guesses: these do not wait
    assert method.untold == 3
    await propose(servicer, telling_row("a", 1))
    assert method.calls == [("propose", "b"), ("propose", "a"), *[("catch_up", "a")] * 3]
    assert len(method.threads) == 1
    await servicer.close()


async def test_who_asks_goes_between_the_pieces_that_another_is_told(gate: Gate) -> None:
    method = EchoDrafter()
    method.untold = 3
    catch_up = method.catch_up

    def held_catch_up(sequence_ids: Sequence[SequenceId]) -> bool:
        gate.pass_through()
        return catch_up(sequence_ids)

    method.catch_up = held_catch_up  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    telling = asyncio.create_task(propose(servicer, telling_row("a", 1)))
    await gate.reached()
    asking = asyncio.create_task(propose(servicer, draft_row("b", 1)))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(telling, asking)
    assert method.calls == [("propose", "a"), ("catch_up", "a"), ("propose", "b"), *[("catch_up", "a")] * 2]
    await servicer.close()


async def test_what_cannot_be_learned_is_left_to_the_next_proposal(caplog: pytest.LogCaptureFixture) -> None:
    method = EchoDrafter()

    def failing(_: Sequence[SequenceId]) -> bool:
        raise RuntimeError("choked")

    method.catch_up = failing  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    assert (await propose(servicer, telling_row("a", 1)))[0].fault is None
    assert "committed tokens could not be computed" in caplog.text
    await servicer.close()


async def test_a_call_that_waits_goes_before_the_next_pass_between_calls(gate: Gate) -> None:
    method = EchoDrafter(growing=5)
    run_ahead = method.run_ahead

    def held_run_ahead() -> bool:
        gate.pass_through()
        return run_ahead()

    method.run_ahead = held_run_ahead  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("a", 1))
    await gate.reached()
    waiting = asyncio.create_task(propose(servicer, draft_row("b", 1)))
    freeing = asyncio.create_task(release(servicer, "a"))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(waiting, freeing)
    await until(lambda: method.growing == 0)
    await servicer.close()
    begun = [("propose", "a"), ("run_ahead",), ("propose", "b"), ("release", "a")]
    assert method.calls == [*begun, *[("run_ahead",)] * 4]


async def test_growth_that_fails_is_logged_and_rests_until_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    method = EchoDrafter()
    tried = 0

    def broken() -> bool:
        nonlocal tried
        tried += 1
        raise RuntimeError("no room to grow")

    method.run_ahead = broken  # type: ignore[method-assign]
    servicer = DraftServicer(method)
    for call in (1, 2):
        assert (await propose(servicer, draft_row("a", 1)))[0].tree == TokenTree.chain([1])
        await until(lambda expected=call: tried == expected)
        await asyncio.sleep(0.01)
    assert tried == 2
    assert servicer.failures == 0
    await servicer.close()
    assert "no room to grow" in caplog.text


async def test_calls_of_several_clients_that_wait_are_computed_together_and_two_of_one_client_are_not(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, method = held
    begun = asyncio.create_task(propose(servicer, draft_row("begun", 1)))
    await gate.reached()
    calls = [("x", "a"), ("x", "b"), ("y", "a"), ("z", "c")]
    waiting = [asyncio.create_task(propose(servicer, draft_row(name, 1), client=client)) for client, name in calls]
    await asyncio.sleep(0)
    gate.opened.set()
    answers = await asyncio.gather(*waiting)
    await begun
    assert [[proposal.sequence_id for proposal in answer] for answer in answers] == [["a"], ["b"], ["a"], ["c"]]
    assert method.calls == [("propose", "begun"), ("propose", "a", "a", "c"), ("propose", "b")]


async def test_a_call_that_spoils_a_shared_batch_spoils_no_other_clients(
    held: tuple[DraftServicer, EchoDrafter], gate: Gate
) -> None:
    servicer, _ = held
    begun = asyncio.create_task(propose(servicer, draft_row("begun", 1)))
    await gate.reached()
    rows = {"x": draft_row("a", POISON), "y": draft_row("a", 1)}
    waiting = [asyncio.create_task(propose(servicer, row, client=client)) for client, row in rows.items()]
    await asyncio.sleep(0)
    gate.opened.set()
    spoilt, fine = await asyncio.gather(*waiting)
    await begun
    assert spoilt[0].fault is not None and spoilt[0].fault.code is RowFaultCode.INVALID
    assert fine[0].tree == TokenTree.chain([1])


async def test_sequences_of_different_clients_do_not_touch_each_other_whatever_they_are_called() -> None:
    servicer = DraftServicer(NgramDrafter(NgramSettings(), DraftSection()))
    async with drafter_at(servicer) as one:
        await one.propose([draft_row("a", 1, 2)], 10)
        further = DraftRow(SequenceId("a"), 3, (3,), DraftBudget(1, 1))
        assert (await propose(servicer, further, client="other"))[0].fault is not None
        await release(servicer, "a", client="other")
        assert (await one.propose([further], 10))[0].fault is None
        with pytest.raises(InvalidRequest, match="client: 'o/ther'"):
            await propose(servicer, further, client="o/ther")
        with pytest.raises(InvalidRequest, match="client"):
            await release(servicer, "a", client="x" * 65)


# --- target -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


def open_engine(directory: Path) -> TargetEngine:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    return TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=20), LocalDecider())


async def test_verdicts_cross_the_wire_as_the_engine_gave_them(directory: Path) -> None:
    batch = StepBatch((verify_row("a", 5, 6, 7), verify_row("b", 9), verify_row("c", tiny.VOCABULARY)))
    expected = open_engine(directory).step(batch)
    async with target_at(TargetServicer(open_engine(directory))) as target:
        info = await target.info()
        assert (info.vocabulary_size, info.kv.blocks_free) == (tiny.VOCABULARY, 20)
        first = await target.step(batch)
        assert (first.verdicts, first.kv) == (expected.verdicts, expected.kv)
        assert (await target.step(batch)).verdicts == expected.verdicts
        opened = await target.open([open_row("child", 5, 6, 7, 8, parent="a"), open_row("new", 1)])
        assert opened.stored_lens == (3, 0)
        await target.release([SequenceId("a"), SequenceId("b"), SequenceId("child"), SequenceId("unknown")])
        assert (await target.info()).kv.blocks_free == 20


async def test_a_row_that_makes_the_engine_raise_faults_alone_and_the_times_add_up() -> None:
    engine = EchoEngine()
    servicer = TargetServicer(engine)
    result = await step(servicer, verify_row("a", 1), verify_row("b", POISON), verify_row("c", 3))
    await servicer.close()
    assert engine.sizes == [3, 1, 1, 1]
    assert [verdict.tokens for verdict in result.verdicts] == [(1,), (), (3,)]
    assert [verdict.fault and verdict.fault.code for verdict in result.verdicts] == [None, RowFaultCode.INVALID, None]
    assert (result.kv, result.step_seconds) == (KV, 1.0)


async def test_an_engine_that_fails_every_row_is_unavailable_and_serves_the_next_step() -> None:
    async with target_at(TargetServicer(EchoEngine())) as target:
        with pytest.raises(TargetUnavailable):
            await target.step(StepBatch((verify_row("a", POISON),)))
        assert (await target.step(StepBatch((verify_row("a", 1),)))).verdicts[0].tokens == (1,)


async def test_a_broken_group_is_told_at_once_and_its_rows_are_not_tried_alone() -> None:
    class Broken(EchoEngine):
        def step(self, batch: StepBatch) -> StepResult:
            self.sizes.append(len(batch.rows))
            raise TargetUnavailable("the tensor-parallel group is broken")

    engine = Broken()
    async with target_at(TargetServicer(engine)) as target:
        with pytest.raises(TargetUnavailable, match="group is broken"):
            await target.step(StepBatch((verify_row("a", 1), verify_row("b", 1))))
    assert engine.sizes == [2]


async def test_what_the_engine_refuses_arrives_as_it_was_raised() -> None:
    async with target_at(TargetServicer(EchoEngine())) as target:
        with pytest.raises(InvalidRequest, match="parent: 'nobody' is refused"):
            await target.open([open_row("child", 1, parent="nobody")])
        with pytest.raises(InvalidRequest, match="tokens"):
            await target.open([open_row("child")])


async def test_who_hosts_an_engine_closes_it_once_in_the_thread_that_it_computes_in() -> None:
    engine = EchoEngine()
    async with host_target("127.0.0.1", engine) as host:
        assert engine.closed_by == []
    await host.stop()
    (thread,) = engine.closed_by
    assert thread.startswith("target")


async def test_an_engine_that_cannot_be_hosted_is_closed() -> None:
    engine = EchoEngine()
    with pytest.raises(ConfigurationError, match="cannot listen"):
        async with host_target("256.0.0.1", engine):
            pass
    assert len(engine.closed_by) == 1


async def test_closing_an_engine_removes_what_it_put_on_disk(directory: Path, tmp_path: Path) -> None:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    section = KvSection(block_size=4, disk_directory=str(tmp_path))
    async with host_target("127.0.0.1", TargetEngine(model, KvPool(model.kv_spec, section, blocks=20), LocalDecider())):
        assert entries(tmp_path)
    assert not entries(tmp_path)


@pytest.mark.filterwarnings("ignore:coroutine")  # Serve awaits `__del__`, the garbage collector does not
@pytest.mark.parametrize("host", ["127.0.0.1", "256.0.0.1"], ids=["served", "not bound"])
async def test_a_replica_that_ends_closes_its_engine(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(actors, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(actors, "free_port", lambda _: 0)
    monkeypatch.setattr(actors, "set_threads", lambda _: None)
    kv = {"pool_bytes": 1 << 20, "disk_directory": str(tmp_path)}
    replica = actors.TargetReplica({"path": str(directory), "device": "cpu", "kv": kv}, 1, host)
    with pytest.raises(ConfigurationError) if host == "256.0.0.1" else nullcontext():
        await replica.reconfigure({"log_level": "warning"})
    assert entries(tmp_path)
    await replica.__del__()
    assert not entries(tmp_path)
    del replica
    gc.collect()
