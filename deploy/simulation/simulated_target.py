"""A simulated target: the state of `workers.verify.engine` with a hash instead of a model, and step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.core.drafting import DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    StepBatch,
    StepResult,
    StepSample,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from deploy.simulation.block_memory import BlockMemory, BlockTable
from deploy.simulation.hashed_model import HashedModel
from deploy.simulation.simulated_drafter import SimulatedDrafter


class StepRow(NamedTuple):
    """A row of a step, as far as the time of the step depends on it."""

    stored: int
    """Tokens whose keys and values are stored."""
    width: int
    """Tokens that are computed, those of a draft included."""


StepTime = Callable[[Sequence[StepRow]], float]
"""Seconds of one step, from its rows."""


def effective_seed(sampling: SamplingParameters) -> int:
    """The seed that decides. A greedy answer does not depend on the seed."""
    return sampling.seed if sampling.temperature > 0 else 0


@dataclass(slots=True)
class _Stored:
    """What the target holds of one sequence."""

    start: SequenceStart
    table: BlockTable = field(default_factory=BlockTable)
    states: list[int] = field(default_factory=lambda: [HashedModel.first_state])
    """The model's state before any token and after each stored one."""
    tokens: list[int] = field(default_factory=list)
    row: VerifyRow | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class TargetStart:
    """The properties of one start of a target."""

    epoch: str
    max_context_len: int
    profile: tuple[StepSample, ...] = ()
    """Step times measured at warm-up."""


class SimulatedTarget:
    """Verifies rows as a target does. Synchronous; it has the interface of `TargetEngine`."""

    def __init__(
        self,
        model: HashedModel,
        memory: BlockMemory,
        step_time: StepTime,
        start: TargetStart,
        drafter: SimulatedDrafter | None = None,
    ) -> None:
        """`drafter` drafts on the target after each step."""
        self.model = model
        self.memory = memory
        self.sequences: dict[SequenceId, _Stored] = {}
        self.steps = 0
        self._step_time = step_time
        self._drafter = drafter
        self._info = TargetInfo(
            model="simulated",
            vocabulary_size=model.vocabulary_size,
            max_context_len=start.max_context_len,
            layout=KvLayout(memory.block_size),
            kv=memory.occupancy(),
            eos_token_ids=model.eos_token_ids,
            tensor_parallel=1,
            dtype="float32",
            epoch=start.epoch,
            profile=start.profile,
        )

    def info(self) -> TargetInfo:
        """Describe this target."""
        return replace(self._info, kv=self.memory.occupancy())

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences, each with as much of its KV as is stored."""
        return OpenResult(tuple(self._open(row) for row in rows), self.memory.occupancy())

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free the sequences' blocks."""
        if self._drafter is not None:
            self._drafter.release(sequence_ids)
        for sequence_id in sequence_ids:
            stored = self.sequences.pop(sequence_id, None)
            if stored is not None:
                self.memory.release(stored.table)
        return self.memory.occupancy()

    def release_all(self) -> KvOccupancy:
        """Free every sequence's blocks."""
        return self.release(list(self.sequences))

    def check(self) -> None:
        """Check that no block is lost. Raises `BlocksNotConserved`."""
        self.memory.check([stored.table for stored in self.sequences.values()])

    def seconds(self, batch: StepBatch) -> float:
        """How long the step takes, in seconds, without the drafts for the next one."""
        return self._step_time([StepRow(row.start_len, row.width) for row in batch.rows])

    def draft_seconds(self, batch: StepBatch) -> float:
        """How long the drafts for the next step take, in seconds."""
        budgets = [row.next_budget for row in batch.rows if row.next_budget.max_nodes]
        if self._drafter is None or not budgets:
            return 0.0
        return self._drafter.speed.seconds(len(budgets), max(budget.max_depth for budget in budgets), 0)

    def step(self, batch: StepBatch) -> StepResult:
        """Verify the rows."""
        self.steps += 1
        verdicts = tuple(self._verify(row) for row in batch.rows)
        drafting = self.draft_seconds(batch)
        return StepResult(verdicts, self.memory.occupancy(), self.seconds(batch) + drafting, drafting)

    def _open(self, row: OpenRow) -> int:
        earlier = self.sequences.get(row.sequence_id)
        parent = self.sequences.get(row.parent) if row.parent is not None else None
        parent = parent or earlier
        states, most = self._states(row.tokens), len(row.tokens) - 1
        shared = 0
        if parent is not None and parent.start.cache_salt == row.start.cache_salt:
            longest = min(most, len(parent.tokens))
            while shared < longest and parent.tokens[shared] == row.tokens[shared]:
                shared += 1
        size = self.memory.block_size
        found = self.memory.find(row.start.cache_salt, [(end, states[end]) for end in range(size, most + 1, size)])
        if parent is not None and shared >= len(found.blocks) * size:
            self.memory.release(found)
            table, stored_len = self.memory.share(parent.table, shared), shared
        else:
            table, stored_len = found, len(found.blocks) * size
        if earlier is not None:
            self.memory.release(earlier.table)
        self.sequences[row.sequence_id] = _Stored(
            row.start, table, states[: stored_len + 1], list(row.tokens[:stored_len])
        )
        return stored_len

    def _states(self, tokens: Sequence[int]) -> list[int]:
        states = [HashedModel.first_state]
        for token in tokens:
            states.append(HashedModel.advance(states[-1], token))
        return states

    def _verify(self, row: VerifyRow) -> Verdict:
        stored = self.sequences.get(row.sequence_id)
        if stored is not None and stored.verdict is not None and row == stored.row:
            return stored.verdict
        if row.start is not None and row.start_len == 0:
            self.release([row.sequence_id])
            stored = self.sequences[row.sequence_id] = _Stored(row.start)
        if stored is None or row.start_len != len(stored.tokens):
            held = 0 if stored is None else len(stored.tokens)
            return _fault(row, RowFaultCode.OUT_OF_SYNC, f"{held} tokens are stored, not {row.start_len}", held)
        before = len(stored.tokens)
        try:
            self.memory.reserve(stored.table, before, row.base_len + len(row.tree))
        except KvPoolExhausted as error:
            if before == 0:
                self.release([row.sequence_id])
            return _fault(row, RowFaultCode.KV_EXHAUSTED, str(error), before)
        self._append(stored, row.pending)
        decided = self._accept(row, stored) if row.decide else ()
        self._append(stored, decided[:-1])
        self.memory.truncate(stored.table, len(stored.tokens))
        size = self.memory.block_size
        ends = range((before // size + 1) * size, len(stored.tokens) + 1, size)
        self.memory.store(stored.start.cache_salt, stored.table, [(end, stored.states[end]) for end in ends])
        stored.row = row
        stored.verdict = Verdict(row.sequence_id, row.base_len, decided, len(row.tree))
        if decided and self._drafter is not None and row.next_budget.max_nodes:
            stored.verdict = replace(stored.verdict, proposal=self._draft(row, stored, decided[-1]))
        return stored.verdict

    def _append(self, stored: _Stored, tokens: Sequence[int]) -> None:
        advance, states = self.model.advance, stored.states
        for token in tokens:
            states.append(advance(states[-1], token))
        stored.tokens.extend(tokens)

    def _accept(self, row: VerifyRow, stored: _Stored) -> tuple[int, ...]:
        """The decisions along the accepted path, cut after a token that ends the answer."""
        sampling, state, tree = stored.start.sampling, stored.states[-1], row.tree
        seed, ends = effective_seed(sampling), sampling.end_token_ids
        decided: list[int] = []
        node: int | None = ROOT
        while node is not None:
            token = self.model.decide(state, seed)
            decided.append(token)
            if token in ends:
                break
            node = tree.child(node, token)
            state = self.model.advance(state, token)
        return tuple(decided)

    def _draft(self, row: VerifyRow, stored: _Stored, last: int) -> Proposal | None:
        if self._drafter is None:
            return None
        tokens = (*stored.tokens, last)
        asked = DraftRow(row.sequence_id, len(tokens), tokens, row.next_budget, stored.start)
        return self._drafter.propose((asked,))[0]


def _fault(row: VerifyRow, code: RowFaultCode, message: str, held: int) -> Verdict:
    return Verdict(row.sequence_id, row.base_len, fault=RowFault(code, message, held))
