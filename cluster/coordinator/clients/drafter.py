"""One drafter as the loop sees it: proposals that fit, or nothing, and never an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.coordinator.clients.circuit_breaker import Breaker
from cluster.coordinator.clients.release_queue import Releases
from cluster.coordinator.metrics import Metrics
from cluster.core.config import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.ports import Drafter
from cluster.core.sequence import Sequence as Answer
from cluster.core.verification import RowFaultCode

log = logging.getLogger(__name__)

PATIENCE = 20
"""A call that is late for its round goes on in the background for this many times the round's timeout: the drafter
may be catching up with a long prompt, and what it learns is not lost."""
PATIENCE_TOKENS = 512
"""With more new tokens than these, in proportion longer."""

Proposals = dict[SequenceId, Proposal]


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that wants guesses; with an empty budget, only to be told of."""

    answer: Answer
    budget: DraftBudget


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a call."""

    proposals: Proposals | None
    """`None` when the drafter failed."""
    seconds: float


Call = asyncio.Task[Reply]


class DrafterLink:
    """Remembers what its drafter was told of each sequence. A sequence is in one call at a time."""

    def __init__(self, drafter: Drafter, section: DraftSection, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._timeout = section.timeout_seconds
        self._metrics = metrics
        self._clock = clock
        self.breaker = Breaker(clock)
        self._releases = Releases(drafter.release)
        self._told: dict[SequenceId, int] = {}
        self._refused: set[SequenceId] = set()
        self._leaving: set[SequenceId] = set()
        self._calls: dict[Call, frozenset[SequenceId]] = {}
        self._tells: set[Call] = set()
        """Those of the calls that ask for nothing."""

    @property
    def is_calling(self) -> bool:
        """Whether any call is under way."""
        return bool(self._calls)

    def is_busy(self, sequence_id: SequenceId) -> bool:
        """Whether a call with this sequence is under way."""
        return any(sequence_id in named for named in self._calls.values())

    def refuses(self, sequence_id: SequenceId) -> bool:
        """Whether the drafter has said that it cannot serve the sequence."""
        return sequence_id in self._refused

    def untold(self, answer: Answer) -> int:
        """How many of its tokens the drafter has not been told."""
        return len(answer) - self._told.get(answer.id, 0)

    def start(self, asks: Sequence[Ask], vocabulary_size: int) -> Call:
        """Ask for sequences that are not busy; nobody needs to wait for it."""
        rows = tuple(self._row(ask) for ask in asks)
        call = asyncio.create_task(self._run(rows, vocabulary_size), name="propose")
        self._calls[call] = frozenset(row.sequence_id for row in rows)
        if not _asks(rows):
            self._tells.add(call)
        call.add_done_callback(self._ended)
        return call

    def late(self) -> None:
        """A call was waited for as long as the configuration allows."""
        self.breaker.failed()
        log.warning("the drafter is late: going on without it")

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The sequences are over; the drafter is told once no call that names them is under way."""
        for sequence_id in sequence_ids:
            self._refused.discard(sequence_id)
            if self._told.pop(sequence_id, None) is not None:
                self._leaving.add(sequence_id)
        for call in self._tells:
            if self._calls[call] <= self._leaving:
                call.cancel()  # there is nobody left to learn for
        self._flush()

    async def close(self, timeout_seconds: float) -> None:
        """End the calls under way and send the last releases."""
        calls = tuple(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._calls.clear()
        self._flush()
        await self._releases.close(timeout_seconds)

    def _row(self, ask: Ask) -> DraftRow:
        answer = ask.answer
        told = self._told.setdefault(answer.id, 0)
        start = answer.start if told == 0 else None
        return DraftRow(answer.id, len(answer), tuple(answer.tokens[told:]), ask.budget, start)

    async def _run(self, rows: tuple[DraftRow, ...], vocabulary_size: int) -> Reply:
        begun = self._clock()
        proposals: Proposals | None = None
        try:
            patience = PATIENCE * max(1.0, sum(len(row.new_tokens) for row in rows) / PATIENCE_TOKENS)
            answer = await self._drafter.propose(rows, self._timeout * patience)
            proposals = self._take(rows, answer, vocabulary_size)
        except WorkerUnavailable as error:
            log.log(logging.WARNING if self.breaker.closed else logging.DEBUG, "no drafts for now: %s", error)
            self.breaker.failed()
        except Exception:
            log.exception("the drafter failed: going on without it")
            self.breaker.failed()
        seconds = self._clock() - begun
        if proposals is not None and (seconds <= self._timeout or not _asks(rows)):  # to learn may take its time
            self.breaker.succeeded()
        self._metrics.drafter_worked(seconds)
        return Reply(proposals, seconds)

    def _take(self, rows: tuple[DraftRow, ...], answer: Iterable[Proposal], vocabulary_size: int) -> Proposals:
        by_sequence = {proposal.sequence_id: proposal for proposal in answer}
        return {row.sequence_id: self._sound(row, by_sequence.get(row.sequence_id), vocabulary_size) for row in rows}

    def _sound(self, row: DraftRow, proposal: Proposal | None, vocabulary_size: int) -> Proposal:
        """What is sound of a proposal; and note what the drafter knows by now."""
        nothing = Proposal(row.sequence_id, row.base_len)
        if proposal is None or proposal.base_len != row.base_len:
            self._metrics.stale_proposal()
            return nothing
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
            return nothing
        nodes = tree.within(row.budget.max_nodes, row.budget.max_depth)
        told = proposal.probabilities
        if len(told) != len(tree) or len(nodes) < len(tree):
            told = tuple(told[node] for node in nodes) if len(told) == len(tree) else ()
        return replace(proposal, tree=tree.subset(nodes), probabilities=told, ready=min(proposal.ready, len(nodes)))

    def _ended(self, call: Call) -> None:
        self._calls.pop(call, None)
        self._tells.discard(call)
        self._flush()

    def _flush(self) -> None:
        """Release those that left; not while a call under way could make the drafter learn them anew."""
        named = frozenset[SequenceId]().union(*self._calls.values()) if self._calls else frozenset()
        free = [sequence_id for sequence_id in self._leaving if sequence_id not in named]
        if free:
            self._releases.add(free)
            self._leaving.difference_update(free)


def _asks(rows: Iterable[DraftRow]) -> bool:
    """Whether guesses are wanted for any of them."""
    return any(row.budget.max_nodes for row in rows)
