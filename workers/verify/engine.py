"""The target's engine: it holds the sequences' KV and verifies batches of rows, one forward pass per step.

Every rank of a tensor-parallel group runs the same engine over the same batches. Through their `Decider` the ranks
agree on every token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cluster.core.config.target_section import EvidenceSection, TargetSection
from cluster.core.drafting import ANY_TOKENS, NextTokens, Proposal, RowFaultCode
from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.ports import DraftMethod
from cluster.core.request import SequenceStart
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
from workers.forward.backends.choice import ChosenBackend
from workers.forward.loaded_model import LoadedModel, PassOptions
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.dequantized import dequantized_from
from workers.sampling.acceptance import AcceptanceRule, create_rule
from workers.sampling.context import DecisionContext, common_leaders
from workers.transfer import DeviceTimer, HostCopies
from workers.verify.ahead import LaunchedRows, LaunchedStep, StepsAhead
from workers.verify.colocated import ColocatedDrafter, VerifiedRow
from workers.verify.constraints import Constraints
from workers.verify.decider import Decider, Decisions, launch_rows
from workers.verify.draft_passes import PartialEngine, connect
from workers.verify.evidence import EvidenceCollector, Fuse, resolve_taps, within_bytes
from workers.verify.forbidden import ForbiddenTexts
from workers.verify.grammars import Grammars
from workers.verify.prompt_logprobs import scored_count, without_prompts
from workers.verify.sequence_state import ReadyRow, SequenceState, sequence_salt
from workers.verify.step_profile import compile_decisions, profile_steps
from workers.verify.verdicts import UNDECIDABLE, fault_verdict, logprobs_ahead, row_problems, source_problem
from workers.verify.walk import TreeWalk, Walked, own_decisions


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine has besides its model, its pool and its decider."""

    served_name: str | None = None
    """The target's name for clients; `None` stands for the model's own."""
    rule: AcceptanceRule = field(default_factory=lambda: create_rule(TargetSection()))
    method: DraftMethod | None = None
    """It drafts here after each step."""
    attention: ChosenBackend | None = None
    """What `choose_attention` returned, if it was called before."""
    evidence: EvidenceSection = field(default_factory=EvidenceSection)
    """What drafters need of each step."""
    fuse: Fuse | None = None
    """What the evidence has in place of hidden states is made by it; see `target.evidence.fusion`."""
    fingerprint: str = ""
    directory: Path | None = None
    """The directory with the tokenizer, which grammars need."""
    is_tried: bool = True
    """Whether the model is known to compute in steps what it computes in one dense pass."""
    goes_ahead: bool = False
    """Whether `step_ahead` launches steps. It gains nothing where the host computes them, and is for one rank."""


class TargetEngine:
    """Verifies batches of rows. Synchronous: one call at a time, always from the same thread."""

    def __init__(
        self, model: LoadedModel, pool: KvPool, decider: Decider, options: EngineOptions | None = None
    ) -> None:
        self._model = model
        self._pool = pool
        self._decider = decider
        self._options = options or EngineOptions()
        self._rule = self._options.rule
        self._evidence = self._options.evidence
        taps = resolve_taps(self._evidence.taps, model.depth)
        self._runner = ModelRunner(model, pool, taps, self._options.attention)
        is_alone = model.tensor_parallel == 1
        self._collector = EvidenceCollector(
            self._evidence, self._runner, decider, is_alone, self._options.method, self._options.fuse
        )
        self._sequences: dict[SequenceId, SequenceState] = {}
        self._sources = SourceStore(pool)
        directory = self._options.directory
        self._grammars = Grammars(directory, model.vocabulary_size, model.eos_token_ids, ranks=model.tensor_parallel)
        self._constraints = Constraints(self._grammars, ForbiddenTexts(directory, model.vocabulary_size))
        self._dequantized_from = "" if directory is None else dequantized_from(directory)
        self._drafter = self._make_drafter(self._options.method)
        self._ahead = StepsAhead(self._drop, self._collector.records_for, is_on=self._options.goes_ahead)
        self._epoch = secrets.token_hex(8)
        self._profile: tuple[StepSample, ...] = ()

    def _make_drafter(self, method: DraftMethod | None) -> ColocatedDrafter | None:
        """The drafter on this rank, connected to the parts of the target that its method computes with."""
        if method is None:
            return None
        part = PartialEngine(self._model, self._pool, self._runner, self._decider, self._sequences)
        computes_here = connect(method, part, self._sources)
        return ColocatedDrafter(method, raises=computes_here and self._model.tensor_parallel > 1)

    def info(self) -> TargetInfo:
        """Describe this target."""
        self._ahead.drop()
        return replace(
            describe_target(self._model, self._pool),
            model=self._options.served_name or self._model.name,
            is_lossless=self._rule.is_lossless and self._pool.is_lossless and self._options.is_tried,
            epoch=self._epoch,
            profile=self._profile,
            fingerprint=self._options.fingerprint,
            dequantized_from=self._dequantized_from,
        )

    def warm_up(self, profile: Sequence[StepSample] = ()) -> None:
        """Compile kernels, capture CUDA graphs, and measure the time of steps unless given. Call this on all ranks."""

        def decide(rows: Sequence[ForwardRow], contexts: Sequence[DecisionContext]) -> Decisions:
            logits = self._runner.forward(rows, PassOptions(leaders=common_leaders(one.sampling for one in contexts)))
            copies = HostCopies()
            launched = self._decider.launch(logits, contexts, copies, self._rule.needs_distribution)
            logprobs_ahead(launched, [(range(len(contexts)), contexts[0].sampling)], copies)
            return launched.read()

        self._runner.warm_up()
        if self._model.device.type == "cuda":
            compile_decisions(self._pool, decide)
        self._profile = tuple(profile) or profile_steps(self._pool, decide)

    def close(self) -> None:
        """Free the memory and files outside of the pool. Closing twice is harmless."""
        self._pool.close()

    # --- sequences ----------------------------------------------------------------------------

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences anew, each with as much of its KV as is already stored. Repeating the call is safe."""
        self._ahead.drop()
        return OpenResult(tuple(self._open(row) for row in rows), self._pool.occupancy())

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free the sequences' blocks; unknown ids are no error."""
        self._ahead.release(sequence_ids)
        if self._drafter is not None:
            self._drafter.release(sequence_ids)
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._pool.release(sequence.table)
                if sequence.source is not None:
                    self._sources.release(sequence.source)
        return self._pool.occupancy()

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is held. Another thread may ask."""
        return not self._sequences

    def release_all(self) -> KvOccupancy:
        """Free every sequence's blocks."""
        return self.release(list(self._sequences))

    def _open(self, row: OpenRow) -> int:
        # Without a parent, the stored version of the sequence serves as the parent.
        parent = self._sequences.get(row.parent) if row.parent is not None else None
        parent = parent or self._sequences.get(row.sequence_id)
        salt = sequence_salt(row.start)
        if row.start.sampling.prompt_logprobs is None:
            table = self._pool.open(row.tokens, salt, parent.table if parent is not None else None)
        else:
            table = self._pool.new_table(salt)  # stored KV has no logits
        self._pool.mark_prompt(table, row.start.prompt_len)
        source = self._sources.share(row.start.source, row.start.cache_salt)
        self.release([row.sequence_id])
        self._sequences[row.sequence_id] = SequenceState(row.start, table, source=source)
        return table.stored_len

    # --- steps --------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> StepResult:
        """Verify the rows in one forward pass. A row that cannot be served gets a fault; the others are verified."""
        begun = time.perf_counter()
        launched = self._ahead.take(batch) or self._launch(batch)
        verdicts, rows = launched.verdicts, launched.rows
        if rows is not None:
            try:
                for entry, verdict in zip(rows.ready, self._decide(rows), strict=True):
                    verdicts[entry.row.sequence_id] = verdict
            except BaseException:
                self._drop(rows.ready)
                raise
        verified = time.perf_counter()
        if rows is not None:
            self._note_compute(rows)
            self._draft(rows.ready, verdicts)
        finished = time.perf_counter()
        drafting = finished - verified if self._drafter is not None else 0.0
        result = StepResult(
            verdicts=tuple(verdicts[row.sequence_id] for row in batch.rows),
            kv=self._pool.occupancy(),
            step_seconds=max(drafting, self._ahead.seconds_before(begun) + finished - begun),
            draft_seconds=drafting,
        )
        self._ahead.end(batch, result.verdicts)
        return result

    @property
    def goes_ahead(self) -> bool:
        """Whether `step_ahead` may launch a step."""
        return self._ahead.is_on

    def step_ahead(self) -> bool:
        """Launch the next step before its rows come, if they are as good as known. For while no call waits.

        Returns false: nothing is left to do.
        """
        expected = self._ahead.expect(self._sequences)
        if expected is not None:
            self._ahead.hold(self._launch(expected, is_ahead=True))
        return False

    def _drop(self, ready: Sequence[ReadyRow]) -> None:
        """Free the blocks reserved for a step of which nothing was committed, and keep the stored tokens."""
        self._collector.discard()
        for entry in ready:
            self._pool.truncate(entry.sequence.table, len(entry.sequence.tokens))

    def _launch(self, batch: StepBatch, *, is_ahead: bool = False) -> LaunchedStep:
        """Check the rows, reserve their blocks, and let the device compute all that it can without the host.

        Of a step that `is_ahead`, nothing is launched unless all rows can be served.
        """
        begun = time.perf_counter()
        verdicts: dict[SequenceId, Verdict] = {}
        rows: list[tuple[VerifyRow, SequenceState]] = []
        ready: list[ReadyRow] = []
        problems = row_problems(batch.rows, self._model.vocabulary_size, self._model.max_context_len)
        for row, problem in zip(batch.rows, problems, strict=True):
            checked = self._check(row, problem)
            if isinstance(checked, SequenceState):
                rows.append((row, checked))
            else:
                verdicts[row.sequence_id] = checked
        refusals = self._constraints.refused(rows)
        with self._pool.reserving_together():
            for index, ((row, sequence), refusal) in enumerate(zip(rows, refusals, strict=True)):
                prepared = refusal or self._prepare(row, sequence, len(rows) - index - 1)
                if isinstance(prepared, ReadyRow):
                    ready.append(prepared)
                else:
                    verdicts[row.sequence_id] = prepared
        if not ready or (is_ahead and verdicts):
            self._drop(ready)
            return LaunchedStep(begun, verdicts, None)
        try:
            with DeviceTimer(self._model.device) as timer:
                logits, leaders = self._forward(ready)
                ready = self._constraints.applied(ready)  # while a GPU computes the pass
                launched = self._launch_decisions(ready, logits, leaders, timer)
            return LaunchedStep(begun, verdicts, launched)
        except BaseException:
            self._drop(ready)
            raise

    def _check(self, row: VerifyRow, problem: str | None) -> SequenceState | Verdict:
        """Check the row and return its sequence, which begins here if the row begins it.

        `problem` is why the row can never be served, whatever is stored. Returns a verdict for a row that needs no
        forward pass.
        """
        if problem:
            return fault_verdict(row, RowFaultCode.INVALID, problem)
        sequence = self._sequences.get(row.sequence_id)
        if sequence is not None and (verdict := sequence.repeated(row)) is not None:
            return verdict
        if row.start is not None and row.start_len == 0:
            sequence = self._begin(row.sequence_id, row.start)
        if sequence is None or row.start_len != len(sequence.tokens):
            stored = 0 if sequence is None else len(sequence.tokens)
            message = f"{stored} tokens are stored, not {row.start_len}"
            return fault_verdict(row, RowFaultCode.OUT_OF_SYNC, message, stored)
        if problem := source_problem(sequence.start.source, self._model.source):
            return fault_verdict(row, RowFaultCode.INVALID, problem)
        return sequence

    def _begin(self, sequence_id: SequenceId, start: SequenceStart) -> SequenceState:
        """The sequence without stored tokens: the one that is held, if it has none, else a new one in its place."""
        held = self._sequences.get(sequence_id)
        grammar = None if held is None or held.start != start else held.grammar
        if grammar is not None:  # a row that has waited for its grammar is sent again
            grammar.restart()
        if held is not None and held.start == start and not held.tokens:
            return held  # `open` found nothing stored, but its table may know which states to keep
        source = self._sources.share(start.source, start.cache_salt)
        self.release([sequence_id])
        table = self._pool.new_table(sequence_salt(start))
        self._pool.mark_prompt(table, start.prompt_len)
        sequence = SequenceState(start, table, source=source, grammar=grammar)
        self._sequences[sequence_id] = sequence
        return sequence

    def _prepare(self, row: VerifyRow, sequence: SequenceState, later: int) -> ReadyRow | Verdict:
        """Reserve the blocks of a row. Returns a verdict for a row that cannot be served now.

        `later` rows of the step are prepared after it.
        """
        sent = row
        if self._pool.states is not None:
            row = self._with_room(row, self._pool.states.free - later)
        scored, nodes = scored_count(row, sequence.start), len(row.tree.tokens)
        select = tuple(range(len(row.pending) - 1, row.width)) if row.decide else ()
        try:
            if sequence.source is None and sequence.start.source:
                sequence.source = self._sources.acquire(sequence.start.source, sequence.start.cache_salt)
            self._pool.reserve(sequence.table, row.base_len + nodes, nodes)
        except KvPoolExhausted as error:
            stored = len(sequence.tokens)
            if stored == 0:
                self.release([row.sequence_id])
            return fault_verdict(row, RowFaultCode.KV_EXHAUSTED, str(error), stored)
        select = (*range(scored), *select) if scored else select
        forward = ForwardRow(sequence.table, row.pending, row.tree, select, source=sequence.source)
        return ReadyRow(row, sequence, forward, scored, sent=sent)

    def _with_room(self, row: VerifyRow, states: int) -> VerifyRow:
        """The row with as much of its tree as these recurrent states are enough for, besides that of its tokens."""
        room = max(0, states - 1)
        if len(row.tree) <= room:
            return row
        return replace(row, tree=row.tree.first(room), distributions=row.distributions[:room])

    def _forward(self, ready: Sequence[ReadyRow]) -> tuple[torch.Tensor, int]:
        """Read new sources and run the forward pass. Returns its logits, and what `common_leaders` says of the rows."""
        read = [entry.sequence.source for entry in ready if entry.sequence.source is not None]
        if new := list(dict.fromkeys(source for source in read if not source.is_encoded)):
            self._runner.encode(new, self._sources)
        rows = [entry.row for entry in ready]
        with_distribution = self._rule.needs_distribution
        leaders = 0 if with_distribution else common_leaders(entry.sequence.start.sampling for entry in ready)
        options = PassOptions(
            with_taps=self._collector.records_hidden(rows),
            leaders=leaders and max(leaders, self._collector.ranked(rows)),
        )
        return self._runner.forward([entry.forward for entry in ready], options), leaders

    def _launch_decisions(
        self, ready: Sequence[ReadyRow], logits: torch.Tensor, leaders: int, timer: DeviceTimer
    ) -> LaunchedRows:
        """Let the device decide at every node of the rows, from the logits of their pass."""
        copies = HostCopies()  # everything below arrives with the decisions, by one wait for a GPU
        logits, prompts = without_prompts(ready, logits, self._decider, copies)
        launched = launch_rows(self._decider, ready, logits, leaders, copies, self._rule.needs_distribution)
        self._collector.launch([entry.row for entry in ready], own_decisions(ready), logits, copies)
        walk = TreeWalk(self._rule, ready, launched, self._model.vocabulary_size, copies)
        return LaunchedRows(ready, logits, prompts, walk, timer)

    def _decide(self, rows: LaunchedRows) -> list[Verdict]:
        """Read the decisions of rows, and accept one path of each tree."""
        verdicts: list[Verdict] = []
        decisions, walks = rows.walk.walk(self._decider)
        with self._pool.moving_together():  # a GPU takes as long to move one row's tokens as those of all
            for index, (entry, walked) in enumerate(zip(rows.ready, walks, strict=True)):
                verdict = self._accept(index, entry, walked, decisions, rows.logits)
                if verdict.fault is None:
                    if logprobs := rows.prompts[index].read():
                        verdict = replace(verdict, prompt_logprobs=logprobs)
                    entry.sequence.prompt_end = rows.prompts[index].end
                    entry.sequence.last_row = entry.sent or entry.row
                    entry.sequence.last_verdict = verdict
                verdicts.append(verdict)
        return verdicts

    def _accept(
        self, index: int, entry: ReadyRow, walked: Walked, decisions: Decisions, logits: torch.Tensor
    ) -> Verdict:
        """Commit the path of the row's tree that is accepted. `logits` are `[decisions, vocabulary]` of all rows."""
        row, sequence, own, accepted = entry.row, entry.sequence, walked.own, walked.accepted
        tokens = decisions.tokens[own.start : own.stop]
        if entry.fault is not None or (row.decide and not accepted.tokens):
            stored = len(sequence.tokens)
            self._pool.truncate(sequence.table, stored)
            return entry.fault or fault_verdict(row, RowFaultCode.INVALID, UNDECIDABLE, stored)
        evidence = None
        if self._evidence.any:
            evidence = self._collector.collect(index, row, accepted, tokens, logits[own.start : own.stop])
        self._runner.commit(entry.forward, accepted.nodes)
        forced = self._grammars.forced(sequence, accepted.tokens)
        ends = sequence.start.sampling.end_token_ids
        is_asked = row.wants_following and bool(accepted.tokens) and accepted.tokens[-1] not in ends
        return Verdict(
            row.sequence_id,
            row.base_len,
            accepted.tokens,
            drafted=len(row.tree.tokens),
            logprobs=walked.logprobs,
            evidence=evidence,
            forced=forced,
            following=self._grammars.following(sequence, forced) if is_asked else None,
        )

    def _draft(self, ready: Sequence[ReadyRow], verdicts: dict[SequenceId, Verdict]) -> None:
        """Let the drafter on this rank propose the next trees, and put them into the verdicts.

        Evidence stays in a verdict only if drafters in other processes need it.
        """
        if not self._collector.is_needed(entry.row for entry in ready):
            self._collector.discard()  # a step that was launched ahead may have recorded more than its rows need
            return
        self._collector.complete(verdicts)
        rows = [(entry, verdicts[entry.row.sequence_id]) for entry in ready]
        rows = [(entry, verdict) for entry, verdict in rows if verdict.fault is None]
        proposals: dict[SequenceId, Proposal] = {}
        if self._drafter is not None:
            verified = [
                VerifiedRow(
                    row=entry.row,
                    start=entry.sequence.start,
                    stored_tokens=entry.sequence.tokens,
                    last_token=verdict.tokens[-1:],
                    evidence=verdict.evidence,
                    next_tokens=self._next_tokens(entry, verdict),
                )
                for entry, verdict in rows
            ]
            proposals = self._drafter.draft(verified)
        sent_evidence = within_bytes([verdict for _, verdict in rows]) if self._evidence.is_sent else [None] * len(rows)
        for (entry, verdict), sent in zip(rows, sent_evidence, strict=True):
            sequence_id = entry.row.sequence_id
            proposal = self._grammars.pruned(proposals.get(sequence_id), entry.sequence)
            if proposal is None and sent is None and verdict.evidence is None:
                continue
            verdict = replace(verdict, evidence=sent, proposal=proposal)
            verdicts[sequence_id] = entry.sequence.last_verdict = verdict

    def _next_tokens(self, entry: ReadyRow, verdict: Verdict) -> NextTokens:
        """What the grammar of a row says of its next draft."""
        is_drafted = entry.row.next_budget.max_nodes and verdict.tokens
        return self._grammars.next_tokens(entry.sequence, verdict.forced) if is_drafted else ANY_TOKENS

    def _note_compute(self, launched: LaunchedRows) -> None:
        """Report the cost of computing to the tiers of the pool, which compare it with the cost of loading blocks."""
        if self._pool.tiers is None:
            return
        rows = [entry.row for entry in launched.ready]
        prompt_tokens = sum(len(row.pending) for row in rows if len(row.pending) > 1)
        self._pool.tiers.record_compute(sum(row.width for row in rows), prompt_tokens, launched.timer)


def describe_target(model: LoadedModel, pool: KvPool) -> TargetInfo:
    """Describe a target that serves this model from this pool."""
    info = TargetInfo(
        model=model.name,
        vocabulary_size=model.vocabulary_size,
        max_context_len=model.max_context_len,
        layout=pool.layout,
        kv=pool.occupancy(),
        eos_token_ids=model.eos_token_ids,
        tensor_parallel=model.tensor_parallel,
        dtype=str(model.dtype).removeprefix("torch."),
        is_lossless=pool.is_lossless,
    )
    if model.source is None:
        return info
    defaults = model.source.defaults
    return replace(
        info,
        decoder_start=defaults.decoder_start,
        max_source_len=model.source.max_source_len,
        forced_eos_token_id=defaults.forced_eos_token_id,
        bad_words=defaults.bad_words,
        no_repeat_ngram_size=defaults.no_repeat_ngram_size,
        min_tokens=defaults.min_tokens,
        beam_scoring=defaults.beam_scoring,
    )
