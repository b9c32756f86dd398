"""The target's engine: it holds the sequences' KV and verifies batches of rows, one forward pass per step.

Every rank of a tensor-parallel group runs the same engine over the same batches. Through their `Decider` the ranks
agree on every token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cluster.core.config.target_section import EvidenceSection, TargetSection
from cluster.core.drafting import Proposal, RowFaultCode
from cluster.core.errors import ConfigurationError, KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.ports import DraftMethod
from cluster.core.request import TokenLogprobs
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
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.dequantized import dequantized_from
from workers.sampling.acceptance import AcceptanceRule, Accepted, RootPosition, create_rule
from workers.sampling.context import GREEDY_BELOW, DecisionContext, common_leaders
from workers.sampling.grammar.matcher import GrammarError
from workers.verify.colocated import ColocatedDrafter, VerifiedRow
from workers.verify.decider import Decider, Decisions, decide_rows
from workers.verify.draft_passes import PartialEngine, connect
from workers.verify.evidence import MAX_SENT_BYTES, EvidenceCollector, resolve_taps, within_bytes
from workers.verify.forbidden import ForbiddenTexts
from workers.verify.grammars import Grammars
from workers.verify.prompt_logprobs import scored_count, without_prompts
from workers.verify.sequence_state import ReadyRow, SequenceState, sequence_salt
from workers.verify.step_profile import profile_steps
from workers.verify.target_description import describe_target
from workers.verify.verdicts import UNDECIDABLE, fault_verdict, path_logprobs, row_problem, source_problem


class TargetEngine:
    """Verifies batches of rows. Synchronous: one call at a time, always from the same thread."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        decider: Decider,
        served_name: str | None = None,
        rule: AcceptanceRule | None = None,
        method: DraftMethod | None = None,
        evidence: EvidenceSection | None = None,
        fingerprint: str = "",
        directory: Path | None = None,
    ) -> None:
        """`method` drafts here after each step. `evidence` is what drafters need; `directory` has the tokenizer."""
        self._model, self._pool, self._fingerprint = model, pool, fingerprint
        self._dequantized_from = "" if directory is None else dequantized_from(directory)
        self._evidence = evidence or EvidenceSection()
        self._runner = ModelRunner(model, pool, resolve_taps(self._evidence.taps, len(model.layers)))
        self._collector = EvidenceCollector(self._evidence, self._runner, decider, model.tensor_parallel == 1, method)
        self._decider = decider
        self._rule = rule or create_rule(TargetSection())
        self._name = served_name or model.name
        self._sequences: dict[SequenceId, SequenceState] = {}
        self._sources = SourceStore(pool)
        self._grammars = Grammars(directory, model.vocabulary_size, model.eos_token_ids, ranks=model.tensor_parallel)
        self._forbidden = ForbiddenTexts(directory, model.vocabulary_size)
        self._drafter: ColocatedDrafter | None = None
        if method is not None:
            part = PartialEngine(model, pool, self._runner, decider, self._sequences)
            computes_here = connect(method, part, self._sources)
            self._drafter = ColocatedDrafter(method, raises=computes_here and model.tensor_parallel > 1)
        self._epoch = secrets.token_hex(8)
        self._profile: tuple[StepSample, ...] = ()

    def info(self) -> TargetInfo:
        """Describe this target."""
        info = describe_target(self._model, self._pool, self._name, is_lossless=self._rule.is_lossless)
        return replace(
            info,
            epoch=self._epoch,
            profile=self._profile,
            fingerprint=self._fingerprint,
            dequantized_from=self._dequantized_from,
        )

    def warm_up(self, profile: Sequence[StepSample] = ()) -> None:
        """Compile kernels, capture CUDA graphs, and measure the time of steps unless given. Call this on all ranks."""
        self._runner.warm_up()
        self._profile = tuple(profile)
        if profile:
            return

        def decide(rows: Sequence[ForwardRow], contexts: Sequence[DecisionContext]) -> Decisions:
            return self._decider.decide(self._runner.forward(rows, leaders=1), contexts, self._rule.needs_distribution)

        self._profile = profile_steps(self._pool, decide)

    def close(self) -> None:
        """Free the memory and files outside of the pool. Closing twice is harmless."""
        self._pool.close()

    # --- sequences ----------------------------------------------------------------------------

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences anew, each with as much of its KV as is already stored. Repeating the call is safe."""
        return OpenResult(tuple(self._open(row) for row in rows), self._pool.occupancy())

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free the sequences' blocks; unknown ids are no error."""
        if self._drafter is not None:
            self._drafter.release(sequence_ids)
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._pool.release(sequence.table)
                if sequence.source is not None:
                    self._sources.release(sequence.source)
        return self._pool.occupancy()

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
        source = self._sources.share(row.start.source, row.start.cache_salt)
        self.release([row.sequence_id])
        self._sequences[row.sequence_id] = SequenceState(row.start, table, source=source)
        return table.stored_len

    # --- steps --------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> StepResult:
        """Verify the rows in one forward pass. A row that cannot be served gets a fault; the others are verified."""
        begun = time.perf_counter()
        verdicts: dict[SequenceId, Verdict] = {}
        ready: list[ReadyRow] = []
        self._grammars.prepare([(row, self._sequences.get(row.sequence_id)) for row in batch.rows])
        for row in batch.rows:
            prepared = self._prepare(row)
            if isinstance(prepared, ReadyRow):
                ready.append(prepared)
            else:
                verdicts[row.sequence_id] = prepared
        if ready:
            try:
                for entry, verdict in zip(ready, self._verify(ready), strict=True):
                    verdicts[entry.row.sequence_id] = verdict
            except BaseException:
                # Nothing was committed: free the blocks reserved for this step, keep the stored tokens.
                self._collector.discard()
                for entry in ready:
                    self._pool.truncate(entry.sequence.table, len(entry.sequence.tokens))
                raise
        verified = time.perf_counter()
        if ready:
            self._note_compute([entry.row for entry in ready], verified - begun)
            self._draft(ready, verdicts)
        finished = time.perf_counter()
        return StepResult(
            verdicts=tuple(verdicts[row.sequence_id] for row in batch.rows),
            kv=self._pool.occupancy(),
            step_seconds=finished - begun,
            draft_seconds=finished - verified if self._drafter is not None else 0.0,
        )

    def _prepare(self, row: VerifyRow) -> ReadyRow | Verdict:
        """Check the row and reserve its blocks. Returns a verdict for a row that needs no forward pass."""
        if problem := row_problem(row, self._model.vocabulary_size, self._model.max_context_len):
            return fault_verdict(row, RowFaultCode.INVALID, problem)
        sequence = self._sequences.get(row.sequence_id)
        if sequence is not None and (verdict := sequence.repeated(row)) is not None:
            return verdict
        if row.start is not None and row.start_len == 0:
            source = self._sources.share(row.start.source, row.start.cache_salt)
            self.release([row.sequence_id])
            sequence = SequenceState(row.start, self._pool.new_table(sequence_salt(row.start)), source=source)
            self._sequences[row.sequence_id] = sequence
        if sequence is None or row.start_len != len(sequence.tokens):
            stored = 0 if sequence is None else len(sequence.tokens)
            message = f"{stored} tokens are stored, not {row.start_len}"
            return fault_verdict(row, RowFaultCode.OUT_OF_SYNC, message, stored)
        if problem := source_problem(sequence.start.source, self._model.source):
            return fault_verdict(row, RowFaultCode.INVALID, problem)
        if not self._grammars.is_ready(row, sequence):
            return fault_verdict(row, RowFaultCode.NOT_READY, "its grammar is being compiled", len(sequence.tokens))
        scored = scored_count(row, sequence.start)
        select = range(len(row.pending) - 1, row.width) if row.decide else range(0)
        try:
            allowed = self._forbidden.without(row, sequence, self._grammars.allowed(row, sequence))
            if sequence.source is None and sequence.start.source:
                sequence.source = self._sources.acquire(sequence.start.source, sequence.start.cache_salt)
            source = sequence.source
            forward = ForwardRow(sequence.table, row.pending, row.tree, (*range(scored), *select), source=source)
            self._pool.reserve(sequence.table, forward.end)
        except GrammarError as error:
            return fault_verdict(row, RowFaultCode.INVALID, f"grammar: {error}", len(sequence.tokens))
        except ConfigurationError as error:
            return fault_verdict(row, RowFaultCode.INVALID, f"bad_texts: {error}", len(sequence.tokens))
        except KvPoolExhausted as error:
            stored = len(sequence.tokens)
            if stored == 0:
                self.release([row.sequence_id])
            return fault_verdict(row, RowFaultCode.KV_EXHAUSTED, str(error), stored)
        return ReadyRow(row, sequence, forward, scored, allowed)

    def _verify(self, ready: Sequence[ReadyRow]) -> list[Verdict]:
        """Read new sources, run the forward pass, decide at every node, and accept one path of each tree."""
        read = [entry.sequence.source for entry in ready if entry.sequence.source is not None]
        if new := list(dict.fromkeys(source for source in read if not source.is_encoded)):
            self._runner.encode(new, self._sources)
        rows, whole = [entry.row for entry in ready], self._rule.needs_distribution
        leaders = 0 if whole else common_leaders(entry.sequence.start.sampling for entry in ready)
        most, records = leaders and max(leaders, self._collector.ranked(rows)), self._collector.records_hidden(rows)
        logits = self._runner.forward([entry.forward for entry in ready], taps=records, leaders=most)
        logits, prompts = without_prompts(ready, logits, self._decider)
        decisions = decide_rows(self._decider, ready, logits, leaders, whole)
        verdicts: list[Verdict] = []
        first = 0
        for index, entry in enumerate(ready):
            indices = range(first, first + len(entry.forward.select) - entry.scored)
            verdicts.append(self._accept(index, entry, decisions, indices, logits, prompts[index]))
            first = indices.stop
        return verdicts

    def _accept(
        self,
        index: int,
        entry: ReadyRow,
        decisions: Decisions,
        indices: range,
        logits: torch.Tensor,
        prompt: tuple[TokenLogprobs, ...],
    ) -> Verdict:
        """Accept a path of the row's tree and commit it. `indices` are those of the row's decisions."""
        row, sequence = entry.row, entry.sequence
        own = slice(indices.start, indices.stop)
        logprobs: tuple[TokenLogprobs, ...] = ()
        accepted, tokens = Accepted(nodes=(), tokens=()), decisions.tokens[own]
        if row.decide:
            sampling, vocabulary = sequence.start.sampling, self._model.vocabulary_size
            root = RootPosition(sampling.seed, row.base_len, vocabulary, sampling.temperature < GREEDY_BELOW)
            distribution = None if decisions.log_probabilities is None else decisions.log_probabilities[own]
            accepted = self._rule.accept(row.tree, tokens, root, distribution, row.distributions)
            if -1 in accepted.tokens:
                self._pool.truncate(sequence.table, stored := len(sequence.tokens))
                return fault_verdict(row, RowFaultCode.INVALID, UNDECIDABLE, stored)
            accepted = accepted.until(sampling.end_token_ids)
            logprobs = path_logprobs(decisions, indices, accepted, sampling)
        taken = self._collector.collect(index, row, accepted, tokens, logits[own]) if self._evidence.any else None
        self._runner.commit(entry.forward, accepted.nodes)
        forced, drafted = self._grammars.forced(sequence, accepted.tokens), len(row.tree)
        verdict = Verdict(
            row.sequence_id, row.base_len, accepted.tokens, drafted, logprobs, None, taken, None, prompt, forced
        )
        sequence.last_row, sequence.last_verdict = row, verdict
        return verdict

    def _draft(self, ready: Sequence[ReadyRow], verdicts: dict[SequenceId, Verdict]) -> None:
        """Let the drafter on this rank propose the next trees, and put them into the verdicts.

        Evidence stays in a verdict only if drafters in other processes need it.
        """
        if not self._collector.is_needed(entry.row for entry in ready):
            return
        self._collector.complete(verdicts)
        rows = [(entry, verdict) for entry in ready if (verdict := verdicts[entry.row.sequence_id]).fault is None]
        proposals: dict[SequenceId, Proposal] = {}
        if self._drafter is not None:
            proposals = self._drafter.draft(
                [
                    VerifiedRow(one.row, one.sequence.start, one.sequence.tokens, verdict.tokens[-1:], verdict.evidence)
                    for one, verdict in rows
                ]
            )
        most_bytes = MAX_SENT_BYTES // max(1, len(rows))
        for entry, verdict in rows:
            sequence_id = entry.row.sequence_id
            sent = within_bytes(verdict.evidence, most_bytes) if self._evidence.is_sent else None
            proposal = self._grammars.pruned(proposals.get(sequence_id), entry.sequence)
            verdict = replace(verdict, evidence=sent, proposal=proposal)
            verdicts[sequence_id] = entry.sequence.last_verdict = verdict

    def _note_compute(self, rows: Sequence[VerifyRow], seconds: float) -> None:
        """Report the cost of computing to the pool, which compares it with the cost of loading blocks.

        A step in which nothing is decided does not wait for a GPU, so its time there is not the cost.
        """
        prompt_tokens = sum(len(row.pending) for row in rows if len(row.pending) > 1)
        awaited = self._model.device.type == "cpu" or any(row.decide for row in rows)
        self._pool.record_compute(sum(row.width for row in rows), prompt_tokens, seconds, awaited=awaited)
