"""A worker that computes one call for too long is unhealthy. A process that answers no pings counts as lost.

Ranks end when they are told to, also while they start.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from cluster.core.config.sections import Configuration
from cluster.core.errors import WorkerUnavailable
from cluster.core.verification import StepBatch, StepResult
from cluster.wire.peer_access import PeerAccess
from tests.support.fakes.echo_workers import EchoEngine, Gate, draft_row, propose, step, until, verify_row
from tests.unit.serve.conftest import HeldRunAhead
from workers.serve.compute_thread import ComputeThread
from workers.serve.draft_servicer import DraftServicer
from workers.serve.rank_actors import MOST_UNANSWERED, RankActors, until_lost
from workers.serve.worker_server import host_target


async def test_a_compute_thread_reports_how_long_its_call_has_been_running(gate: Gate) -> None:
    now = 100.0
    thread = ComputeThread("test", clock=lambda: now)
    assert thread.busy_seconds == 0
    running = asyncio.create_task(thread.run(gate.pass_through))
    waiting = asyncio.create_task(thread.run(lambda: None))
    await gate.reached()
    now = 130.0
    assert thread.busy_seconds == 30
    gate.opened.set()
    await asyncio.gather(running, waiting)
    await until(lambda: thread.busy_seconds == 0)
    await thread.close()


async def test_a_piece_of_idle_work_counts_as_a_call(gate: Gate) -> None:
    method = HeldRunAhead(gate, passes_left=1)
    servicer = DraftServicer(method)
    await propose(servicer, draft_row("a", 1))
    await gate.reached()
    assert servicer.busy_seconds > 0
    gate.opened.set()
    await until(lambda: servicer.busy_seconds == 0)
    await servicer.close()


class GatedEngine(EchoEngine):
    """An engine whose steps wait for a gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def step(self, batch: StepBatch) -> StepResult:
        self.gate.pass_through()
        return super().step(batch)


async def test_a_worker_whose_step_does_not_end_is_unhealthy_until_it_does(gate: Gate) -> None:
    async with host_target("127.0.0.1", GatedEngine(gate), hang_seconds=0.0) as hung:
        hung.check_health()
        stepping = asyncio.create_task(step(hung._servicer, verify_row("a", 1)))  # type: ignore[arg-type]
        await gate.reached()
        with pytest.raises(WorkerUnavailable, match="longer than 0 s"):
            hung.check_health()
        gate.opened.set()
        await stepping
        await until(lambda: hung._servicer.busy_seconds == 0)
        hung.check_health()


async def test_a_process_that_answers_every_few_pings_is_slow_and_not_lost() -> None:
    pings = 0

    async def ping() -> None:
        nonlocal pings
        pings += 1
        if pings > 3 * MOST_UNANSWERED:
            raise RuntimeError("the process has died")
        if pings % MOST_UNANSWERED:
            await asyncio.Event().wait()

    assert await until_lost(ping, seconds=0.001, period_seconds=0.0) == "the process has died"
    assert pings == 3 * MOST_UNANSWERED + 1


async def test_a_process_that_stops_to_answer_is_lost_within_a_bound() -> None:
    pings = 0

    async def ping() -> None:
        nonlocal pings
        pings += 1
        if pings > 2:
            await asyncio.Event().wait()

    assert "frozen" in await until_lost(ping, seconds=0.001, period_seconds=0.0)
    assert pings == 2 + MOST_UNANSWERED


class StartingRank:
    """A rank as its owner sees it through Ray: it says where it is and stops when asked to, but does not start."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: self._answer(method)))

    @staticmethod
    def _answer(method: str) -> Future[None]:
        answer: Future[None] = Future()
        if method != "start":
            answer.set_result(None)
        return answer


class OnePlace:
    """A placement of one rank."""

    spans_nodes = False
    step_profile = ()

    def __init__(self) -> None:
        self.rank, self.is_discarded = StartingRank(), False

    async def take(self) -> list[StartingRank]:
        return [self.rank]

    def discard(self) -> None:
        self.is_discarded = True


async def test_a_rank_that_has_not_started_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[StartingRank] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    placement = OnePlace()
    ranks = RankActors(Configuration(), 1, "127.0.0.1", cast("Any", placement), PeerAccess())
    starting = asyncio.create_task(ranks.start())
    await asyncio.sleep(0.05)
    starting.cancel()
    await ranks.stop()
    assert (killed, placement.is_discarded) == ([placement.rank], True)
