"""The batched step: rows in, verdicts out. The target's memory and its decisions live here.

Every rank of a tensor-parallel group runs the same engine over the same batches; what differs is
the `Decider`, through which the ranks agree on every token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.request import SequenceStart, TokenLogprobs
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    RowFault,
    RowFaultCode,
    StepBatch,
    StepResult,
    StepSample,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool
from workers.sampling.accept import AcceptanceRule, Accepted, Coupled, Place
from workers.sampling.context import Branch, DecisionContext, tree_contexts
from workers.sampling.decide import Undecidable, decide
from workers.sampling.logprobs import token_logprobs
from workers.verify.step_profile import profile_steps


@dataclass(frozen=True, slots=True)
class Decisions:
    """One decision per selected position, and the whole logits where this rank has them."""

    tokens: list[int]
    """-1 where the model's logits hold no number to decide by."""
    logits: dict[int, torch.Tensor]
    """Decision index → `[vocabulary]`, for the decisions whose log-probabilities were asked for."""


class Decider(Protocol):
    """Turns logits into tokens: alone, or with the other ranks."""

    def decide(self, logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> Decisions:
        """`logits` `[decisions, vocabulary (this rank's part)]`; the same tokens on every rank."""
        ...


class LocalDecider:
    """Decides where the logits are whole."""

    def decide(self, logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> Decisions:
        """See `Decider`."""

        def choose(rows: list[int]) -> list[int]:
            return decide(logits if len(rows) == len(contexts) else logits[rows], [contexts[row] for row in rows])

        tokens = mark_undecidable(len(contexts), choose)
        asked = {
            index: logits[index] for index, context in enumerate(contexts) if context.sampling.logprobs is not None
        }
        return Decisions(tokens, asked)


def mark_undecidable(count: int, choose: Callable[[list[int]], list[int]]) -> list[int]:
    """`choose` for all of `count` rows; those that hold no number get -1 and the others are chosen without them."""
    rows = list(range(count))
    try:
        return choose(rows)
    except Undecidable as hopeless:
        tokens = [-1] * count
        sound = [row for row in rows if row not in hopeless.rows]
        for row, token in zip(sound, choose(sound), strict=True):
            tokens[row] = token
        return tokens


@dataclass(slots=True)
class _Record:
    """What the target holds of one sequence."""

    start: SequenceStart
    table: BlockTable
    answered: VerifyRow | None = None
    verdict: Verdict | None = None

    @property
    def tokens(self) -> list[int]:
        """Those whose KV is stored."""
        return self.table.tokens


@dataclass(frozen=True, slots=True)
class _Work:
    """A row that goes into the forward pass."""

    row: VerifyRow
    record: _Record
    forward: ForwardRow


class TargetEngine:
    """Synchronous; one step at a time, always from the same thread."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        decider: Decider,
        served_name: str | None = None,
        rule: AcceptanceRule | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._runner = ModelRunner(model, pool)
        self._decider = decider
        self._rule = rule or Coupled()
        self._name = served_name or model.name
        self._records: dict[SequenceId, _Record] = {}
        self._epoch = secrets.token_hex(8)
        self._profile: tuple[StepSample, ...] = ()

    def info(self) -> TargetInfo:
        """What this target is."""
        return TargetInfo(
            model=self._name,
            vocabulary_size=self._model.vocabulary_size,
            max_context_len=self._model.max_context_len,
            layout=self._pool.layout,
            kv=self._pool.occupancy(),
            eos_token_ids=self._model.eos_token_ids,
            tensor_parallel=self._model.tensor_parallel,
            dtype=str(self._model.dtype).removeprefix("torch."),
            epoch=self._epoch,
            profile=self._profile,
            is_lossless=self._rule.is_lossless,
        )

    def warm_up(self) -> None:
        """Pay now for what the first steps would wait for, and measure a few. On all ranks at once."""
        self._runner.warm_up()
        self._profile = profile_steps(
            self._pool, lambda rows, contexts: self._decider.decide(self._runner.forward(rows), contexts)
        )

    def step(self, batch: StepBatch) -> StepResult:
        """Compute the rows in one forward pass. A row that cannot be served faults alone."""
        begun = time.perf_counter()
        verdicts: dict[SequenceId, Verdict] = {}
        works: list[_Work] = []
        for row in batch.rows:
            prepared = self._prepare(row)
            if isinstance(prepared, _Work):
                works.append(prepared)
            else:
                verdicts[row.sequence_id] = prepared
        if works:
            try:
                for work, verdict in zip(works, self._compute(works), strict=True):
                    verdicts[work.row.sequence_id] = verdict
            except BaseException:
                # Nothing was kept: what was reserved for this step goes back, the stored tokens stay.
                for work in works:
                    self._pool.truncate(work.record.table, len(work.record.tokens))
                raise
        seconds = time.perf_counter() - begun
        if works:
            self._note_compute([work.row for work in works], seconds)
        return StepResult(
            verdicts=tuple(verdicts[row.sequence_id] for row in batch.rows),
            kv=self._pool.occupancy(),
            step_seconds=seconds,
        )

    def close(self) -> None:
        """Free what was taken outside of the pool. Closing twice is harmless."""
        self._pool.close()

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free the sequences' blocks; unknown ones are no error."""
        for sequence_id in sequence_ids:
            record = self._records.pop(sequence_id, None)
            if record is not None:
                self._pool.release(record.table)
        return self._pool.occupancy()

    def release_all(self) -> KvOccupancy:
        """Free every sequence's blocks."""
        return self.release(list(self._records))

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences anew, each with as much of its KV as is stored already. Repeating it does no harm."""
        return OpenResult(tuple(self._open(row) for row in rows), self._pool.occupancy())

    def _open(self, row: OpenRow) -> int:
        # A sequence that is held already is its own parent, if it has no other one.
        parent = self._records.get(row.parent) if row.parent is not None else None
        parent = parent or self._records.get(row.sequence_id)
        table = self._pool.open(row.tokens, row.start.cache_salt, parent.table if parent is not None else None)
        self.release([row.sequence_id])
        self._records[row.sequence_id] = _Record(row.start, table)
        return table.stored_len

    def _note_compute(self, rows: Sequence[VerifyRow], seconds: float) -> None:
        """Tell the memory what computing costs. A device is only waited for where something is decided."""
        prompt_tokens = sum(len(row.pending) for row in rows if len(row.pending) > 1)
        awaited = self._model.device.type == "cpu" or any(row.decide for row in rows)
        self._pool.note_compute(sum(row.width for row in rows), prompt_tokens, seconds, awaited=awaited)

    def _prepare(self, row: VerifyRow) -> _Work | Verdict:
        """Check the row against what is held and reserve its blocks; or say at once what came of it."""
        problem = self._problem(row)
        if problem is not None:
            return _fault(row, RowFaultCode.INVALID, problem)
        record = self._records.get(row.sequence_id)
        if record is not None and row == record.answered and record.verdict is not None:
            return record.verdict  # a repeated message repeats its answer
        if row.start is not None and row.start_len == 0:
            self.release([row.sequence_id])
            record = self._records[row.sequence_id] = _Record(row.start, self._pool.new_table(row.start.cache_salt))
        if record is None or row.start_len != len(record.tokens):
            held = 0 if record is None else len(record.tokens)
            return _fault(row, RowFaultCode.OUT_OF_SYNC, f"{held} tokens are stored, not {row.start_len}", held)
        select = range(len(row.pending) - 1, row.width) if row.decide else range(0)
        forward = ForwardRow(record.table, row.pending, row.tree, tuple(select))
        try:
            self._pool.reserve(record.table, forward.end)
        except KvPoolExhausted as error:
            held = len(record.tokens)
            if held == 0:
                self.release([row.sequence_id])
            return _fault(row, RowFaultCode.KV_EXHAUSTED, str(error), held)
        return _Work(row, record, forward)

    def _problem(self, row: VerifyRow) -> str | None:
        """Why this row can never be served, if so."""
        if not row.pending:
            return "pending: it must hold at least one token"
        for name, tokens in (("pending", row.pending), ("tree.tokens", row.tree.tokens)):
            worst = max(tokens, default=0)
            if worst >= self._model.vocabulary_size:
                return f"{name}: token {worst} must be below the vocabulary size {self._model.vocabulary_size}"
        if row.base_len + row.tree.depth() > self._model.max_context_len:
            return (
                f"base_len: {row.base_len} + a tree of depth {row.tree.depth()} is beyond the context of "
                f"{self._model.max_context_len} tokens"
            )
        if row.tree and not row.decide:
            return "tree: it must be empty where nothing is decided"
        return None

    def _compute(self, works: Sequence[_Work]) -> list[Verdict]:
        """Forward, decide at every node, walk, keep."""
        logits = self._runner.forward([work.forward for work in works])
        contexts = [context for work in works for context in _contexts(work)]
        decisions = self._decider.decide(logits, contexts)
        verdicts: list[Verdict] = []
        first = 0
        for work in works:
            count = len(work.forward.select)
            verdicts.append(self._conclude(work, decisions, range(first, first + count)))
            first += count
        return verdicts

    def _conclude(self, work: _Work, decisions: Decisions, mine: range) -> Verdict:
        row, record = work.row, work.record
        accepted = Accepted(nodes=(), tokens=())
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row.decide:
            chosen = [decisions.tokens[index] for index in mine]
            place = Place(record.start.sampling.seed, row.base_len, self._model.vocabulary_size)
            accepted = self._rule(row.tree, chosen, place)
            if -1 in accepted.tokens:
                self._pool.truncate(record.table, len(record.tokens))
                return _fault(row, RowFaultCode.INVALID, "the model's logits hold no number here", len(record.tokens))
            logprobs = _logprobs(decisions, mine, accepted, record.start.sampling.logprobs)
        self._runner.keep(work.forward, accepted.nodes)
        record.answered = row
        record.verdict = Verdict(
            sequence_id=row.sequence_id,
            base_len=row.base_len,
            tokens=accepted.tokens,
            drafted=len(row.tree),
            logprobs=logprobs,
        )
        return record.verdict


def _contexts(work: _Work) -> tuple[DecisionContext, ...]:
    """One per decision: at the last pending token, then at every node of the tree."""
    if not work.row.decide:
        return ()
    start = work.record.start
    return tree_contexts(start.sampling, Branch(work.record.tokens, work.row.pending), start.prompt_len, work.row.tree)


def _logprobs(decisions: Decisions, mine: range, accepted: Accepted, count: int | None) -> tuple[TokenLogprobs, ...]:
    """Of the accepted path's decisions; nothing on a rank that has only its part of the logits."""
    if count is None:
        return ()
    # The decision after accepting node i was taken at i + 1; the first one at the root.
    indices = [mine[0], *(mine[node + 1] for node in accepted.nodes)]
    if any(index not in decisions.logits for index in indices):
        return ()
    logits = torch.stack([decisions.logits[index] for index in indices])
    return token_logprobs(logits, accepted.tokens, [count] * len(indices))


def _fault(row: VerifyRow, code: RowFaultCode, message: str, stored_len: int = 0) -> Verdict:
    return Verdict(row.sequence_id, row.base_len, fault=RowFault(code, message, stored_len))
