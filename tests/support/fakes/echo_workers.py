"""Servicers over a drafter and an engine that echo the last token, and fail on one token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Proposal
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec.draft import decode_proposals, encode_draft_rows
from cluster.wire.codec.step import decode_step_result, encode_step_batch
from cluster.wire.connection import Resolve, fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.server import WireServer
from cluster.wire.target_client import GrpcTarget
from pilotfish.v1 import draft_pb2, draft_pb2_grpc, target_pb2_grpc
from workers.serve.draft_servicer import DraftServicer
from workers.serve.target_servicer import TargetServicer
from workers.serve.worker_server import DRAFT_SERVICE, TARGET_SERVICE

START = SequenceStart(1, SamplingParameters(temperature=0.0))
POISON = 666
KV = KvOccupancy(10, 4)


def draft_row(name: str, *tokens: int) -> DraftRow:
    return DraftRow(SequenceId(name), len(tokens), tokens, DraftBudget(4, 4), START)


def row_without_budget(name: str, *tokens: int) -> DraftRow:
    return replace(draft_row(name, *tokens), budget=NO_DRAFT)


def open_row(name: str, *tokens: int, parent: str | None = None) -> OpenRow:
    return OpenRow(SequenceId(name), tokens, START, None if parent is None else SequenceId(parent))


def verify_row(name: str, *tokens: int) -> VerifyRow:
    return VerifyRow(SequenceId(name), len(tokens), tokens, start=START)


class Gate:
    """Blocks the compute thread until it is opened, and signals when the thread has arrived."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._arrived = threading.Event()

    def pass_through(self) -> None:
        self._arrived.set()
        assert self.opened.wait(10)

    async def reached(self) -> None:
        await asyncio.to_thread(self._arrived.wait, 10)


class EchoDrafter:
    """Drafts each row's last token. Raises for one token."""

    def __init__(self, before: Callable[[], None] = lambda: None, passes_left: int = 0) -> None:
        self.before = before
        self.passes_left = passes_left
        """Number of passes left to run between calls."""
        self.pieces_left = 0
        """Number of pieces of committed tokens that are not yet computed."""
        self.calls: list[tuple[str, ...]] = []
        self.threads: set[int] = set()

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self._note("propose", *(row.sequence_id for row in rows))
        self.before()
        if any(POISON in row.new_tokens for row in rows):
            raise RuntimeError("poisoned token")
        return tuple(Proposal(row.sequence_id, row.base_len, TokenTree.chain(row.new_tokens[-1:])) for row in rows)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        if self.pieces_left < 1:
            return False
        self._note("catch_up", *sequence_ids)
        self.pieces_left -= 1
        return True

    def run_ahead(self) -> bool:
        if self.passes_left < 1:
            return False
        self._note("run_ahead")
        self.passes_left -= 1
        return True

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._note("release", *sequence_ids)

    def _note(self, kind: str, *names: str) -> None:
        self.calls.append((kind, *(name.partition("/")[2] for name in names)))
        self.threads.add(threading.get_ident())


class EchoEngine:
    """Decides each row's last token again. Raises for one token."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.closed_by: list[str] = []
        self.released: list[SequenceId] = []

    def step(self, batch: StepBatch) -> StepResult:
        self.sizes.append(len(batch.rows))
        if any(POISON in row.pending for row in batch.rows):
            raise RuntimeError("poisoned token")
        verdicts = tuple(Verdict(row.sequence_id, row.base_len, row.pending[-1:]) for row in batch.rows)
        return StepResult(verdicts, KV, 0.5, 0.125)

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        self.released.extend(sequence_ids)
        return KvOccupancy(10, 4 + len(sequence_ids))

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        if not rows:
            return OpenResult((), KV)
        raise InvalidRequest("parent", rows[0].parent, "a sequence that the target stores")

    def info(self) -> TargetInfo:
        return TargetInfo("echo", 700, 64, KvLayout(4), KV, (2,), 1, "float32", "e")

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def answer_to(method: Callable[[Any, Any], AsyncIterator[Any]], request: Any) -> Any:
    """The response to one request of a stream."""

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


@asynccontextmanager
async def _served(
    service: str, add_to_server: Callable[[Any, Any], None], servicer: DraftServicer | TargetServicer
) -> AsyncIterator[Resolve]:
    """Serve on a free port. Yields the function that resolves the address, and closes the servicer at the end."""
    async with WireServer("127.0.0.1", 0) as server:
        server.add(service, add_to_server, servicer)
        yield fixed_address(f"127.0.0.1:{await server.start()}")
    await servicer.close()


@asynccontextmanager
async def drafter_at(servicer: DraftServicer) -> AsyncIterator[GrpcDrafter]:
    add = draft_pb2_grpc.add_DraftServiceServicer_to_server
    async with _served(DRAFT_SERVICE, add, servicer) as resolve:
        drafter = GrpcDrafter(resolve)
        yield drafter
        await drafter.close()


@asynccontextmanager
async def target_at(servicer: TargetServicer) -> AsyncIterator[GrpcTarget]:
    add = target_pb2_grpc.add_TargetServiceServicer_to_server
    async with _served(TARGET_SERVICE, add, servicer) as resolve:
        target = GrpcTarget(resolve)
        yield target
        await target.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)
