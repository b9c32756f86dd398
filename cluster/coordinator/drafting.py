"""The drafter as the loop sees it: trees when they come in time and fit, nothing otherwise, and never an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.coordinator.breaker import Breaker
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.releases import Releases
from cluster.core.config import DraftSection
from cluster.core.errors import WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.ports import Drafter
from cluster.core.sequence import Sequence as Answer
from cluster.core.tree import TokenTree
from cluster.core.types import DraftBudget, DraftRow, Proposal, RowFaultCode

log = logging.getLogger(__name__)

PATIENCE = 20
"""A call that is late for its round goes on in the background for this many times the round's timeout: the drafter
may be catching up with a long prompt, and what it learns is not lost."""

Trees = dict[SequenceId, TokenTree]


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that wants guesses."""

    answer: Answer
    budget: DraftBudget


class Drafting:
    """Asks for trees, and remembers what the drafter was told of each sequence. One call at a time."""

    def __init__(self, drafter: Drafter, section: DraftSection, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._timeout = section.timeout_seconds
        self._metrics = metrics
        self._clock = clock
        self._breaker = Breaker(clock)
        self._releases = Releases(drafter.release)
        self._told: dict[SequenceId, int] = {}
        self._refused: set[SequenceId] = set()
        self._leaving: list[SequenceId] = []
        self._call: asyncio.Task[Trees | None] | None = None

    async def propose(self, asks: Sequence[Ask], vocabulary_size: int) -> Trees:
        """Trees for those that got one within the timeout. Raises nothing.

        A sequence that the drafter cannot serve is not asked for again.
        """
        asks = [ask for ask in asks if ask.answer.id not in self._refused]
        if not asks:
            return {}
        if self._call is not None and not self._call.done():
            self._metrics.drafter_fallback("busy")
            return {}
        if not self._breaker.closed:
            if self._breaker.due():
                self._start(asks, vocabulary_size)
            self._metrics.drafter_fallback("open")
            return {}
        call = self._start(asks, vocabulary_size)
        await asyncio.wait({call}, timeout=self._timeout)
        if not call.done():
            self._breaker.failed()
            self._metrics.drafter_fallback("late")
            log.warning("the drafter is late: going on without it")
            return {}
        trees = call.result()
        if trees is None:
            self._metrics.drafter_fallback("failed")
        return trees or {}

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The sequences are over; the drafter is told once no call that names them is under way."""
        for sequence_id in sequence_ids:
            self._refused.discard(sequence_id)
            if self._told.pop(sequence_id, None) is not None:
                self._leaving.append(sequence_id)
        self._flush()

    async def close(self, timeout_seconds: float) -> None:
        """End the call under way and send the last releases."""
        if self._call is not None:
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)
        self._flush()
        await self._releases.close(timeout_seconds)

    def _start(self, asks: Sequence[Ask], vocabulary_size: int) -> asyncio.Task[Trees | None]:
        rows = tuple(self._row(ask) for ask in asks)
        self._call = asyncio.create_task(self._run(rows, vocabulary_size), name="propose")
        self._call.add_done_callback(lambda _: self._flush())
        return self._call

    def _row(self, ask: Ask) -> DraftRow:
        answer = ask.answer
        told = self._told.setdefault(answer.id, 0)
        start = answer.start if told == 0 else None
        return DraftRow(answer.id, len(answer), tuple(answer.tokens[told:]), ask.budget, start)

    async def _run(self, rows: tuple[DraftRow, ...], vocabulary_size: int) -> Trees | None:
        """The trees, or `None` when the drafter failed."""
        begun = self._clock()
        try:
            proposals = await self._drafter.propose(rows, self._timeout * PATIENCE)
            trees = self._take(rows, proposals, vocabulary_size)
        except WorkerUnavailable as error:
            log.log(logging.WARNING if self._breaker.closed else logging.DEBUG, "no drafts for now: %s", error)
            self._breaker.failed()
            return None
        except Exception:
            log.exception("the drafter failed: going on without it")
            self._breaker.failed()
            return None
        if self._clock() - begun <= self._timeout:
            self._breaker.succeeded()
        return trees

    def _take(self, rows: tuple[DraftRow, ...], proposals: Iterable[Proposal], vocabulary_size: int) -> Trees:
        by_sequence = {proposal.sequence_id: proposal for proposal in proposals}
        return {row.sequence_id: self._tree(row, by_sequence.get(row.sequence_id), vocabulary_size) for row in rows}

    def _tree(self, row: DraftRow, proposal: Proposal | None, vocabulary_size: int) -> TokenTree:
        """What is sound of a proposal; and note what the drafter knows by now."""
        if proposal is None or proposal.base_len != row.base_len:
            self._metrics.stale_proposal()
            return TokenTree()
        if row.sequence_id in self._told:
            if proposal.fault is None:
                self._told[row.sequence_id] = row.base_len
            elif proposal.fault.code is RowFaultCode.OUT_OF_SYNC:
                self._told[row.sequence_id] = 0
            elif proposal.fault.code is RowFaultCode.INVALID:
                log.warning("the drafter cannot serve %s: %s", row.sequence_id, proposal.fault.message)
                self._refused.add(row.sequence_id)
        tree = proposal.tree
        if proposal.fault is not None or not all(0 <= token < vocabulary_size for token in tree.tokens):
            return TokenTree()
        return tree.truncated(row.budget.max_nodes, row.budget.max_depth)

    def _flush(self) -> None:
        """Release those that left; not while a call under way could make the drafter learn them anew."""
        if self._leaving and (self._call is None or self._call.done()):
            self._releases.add(self._leaving)
            self._leaving = []
