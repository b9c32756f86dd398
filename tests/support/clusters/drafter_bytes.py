"""How many bytes reach a drafter in another process: rows of a target's engine, over gRPC on a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import VerifyRow
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from tests.support.engines.engine_rows import first_row, verify
from workers.draft.ngram import NgramDrafter, NgramSettings
from workers.serve.worker_server import host_draft
from workers.verify.build import build_engine

LOOPBACK = "127.0.0.1"
BUDGET = DraftBudget(4, 4)
TIMEOUT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 16


class ByteRelay:
    """Forwards TCP connections to an address inside `async with`, and counts the bytes that it forwards there."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._forwarding: set[asyncio.Task[None]] = set()
        self.address = ""
        self.sent = 0
        """Bytes that were sent to the address."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        self.address = f"{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._forwarding:
            task.cancel()
        await asyncio.gather(*self._forwarding, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(self._host, self._port)
        for task in (self._forward(reader, requests, counts=True), self._forward(answers, writer, counts=False)):
            self._forwarding.add(asyncio.create_task(task))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                self.sent += len(data) if counts else 0
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


def shown_rows(target: TargetSection, prompt: Sequence[int], steps: int) -> list[DraftRow]:
    """Rows for a drafter of one sequence, with what the target's engine shows of it: its prompt, then each token."""
    engine = build_engine(target)
    tokens, known, rows = list(prompt), 0, []
    row = first_row("a", prompt)
    for _ in range(1 + steps):
        verdict = verify(engine, row)
        if verdict.evidence is None:
            raise ValueError(f"the target shows nothing of {len(tokens)} tokens")
        tokens += verdict.tokens
        new = tuple(tokens[known:])
        rows.append(DraftRow(SequenceId("a"), len(tokens), new, BUDGET, row.start, (verdict.evidence,)))
        known = len(tokens)
        row = VerifyRow(SequenceId("a"), known, tuple(tokens[-1:]))
    engine.close()
    return rows


async def sent_bytes(rows: Sequence[DraftRow]) -> list[int]:
    """The bytes that each row sends to a drafter over gRPC, one call for each, after a first call that connects."""
    start = SequenceStart(1, SamplingParameters())
    found: list[int] = []
    async with (
        host_draft(LOOPBACK, NgramDrafter(NgramSettings(), DraftSection())) as host,
        ByteRelay(host.address) as relay,
    ):
        drafter = GrpcDrafter(fixed_address(relay.address))
        await drafter.propose([DraftRow(SequenceId("first"), 1, (1,), BUDGET, start)], TIMEOUT_SECONDS)
        for row in rows:
            before = relay.sent
            await drafter.propose([row], TIMEOUT_SECONDS)
            found.append(relay.sent - before)
        await drafter.close()
    return found
