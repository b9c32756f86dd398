"""The speculation controller: how large trees should be, which nodes to verify, and whether drafts save time at all.

The controller has no clock and calls no worker: what it decides depends on its observations alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.core import sequence as core
from cluster.core.drafting import NO_DRAFT, DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.scheduling.allocation import clip_draft
from cluster.core.scheduling.state import WantedDrafts
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepSample
from cluster.speculation.constants import (
    CONTROL_ROUNDS,
    EAGER_ROWS,
    EVIDENCE_ROUNDS,
    FULL_ROUNDS,
    IDLE_SIZING_FACTOR,
    LEARNED_TREES,
    MIN_PATIENCE_SECONDS,
    PATIENCE,
    PROBED_SIZING_ROUNDS,
    SIZING_ROUNDS,
    START_SPEEDUP,
    START_SPEEDUP_ALONE,
    STOP_SPEEDUP,
    STOP_SPEEDUP_ALONE,
    SURE_FACTOR,
    SURE_SPEEDUP,
    TRIAL_SIZINGS,
)
from cluster.speculation.estimator import AcceptanceEstimator
from cluster.speculation.goodput import TreeSizes, budget_for, prune_trees, size_trees
from cluster.speculation.latency import LatencyModel, bucket_of
from cluster.speculation.observation import Observation, Probe, RoundRecord
from cluster.speculation.speedup import SpeedupTracker


@dataclass(frozen=True, slots=True)
class PrunedDrafts:
    """The proposals to verify, and the expected time of their step."""

    proposals: dict[SequenceId, Proposal] = field(default_factory=dict)
    step_seconds: float | None = None
    """`None` without a controller."""


class SpeculationController:
    """Sizes and prunes trees by the observed latency, acceptance and speed-up."""

    is_adaptive = True

    def __init__(
        self,
        max_draft: DraftBudget,
        first_draft: DraftBudget | None = None,
        *,
        is_ahead: bool = False,
        halves: bool = False,
    ) -> None:
        """`first_draft` is the largest tree while nothing is known of proposals; unset: `max_draft`.

        `is_ahead` says that the budgets of a round are for the drafts of the next one. With `halves`, only every other
        sequence is in the same step.
        """
        self.max_draft = max_draft
        self.first_draft = first_draft or max_draft
        self._control_rounds = 2 if is_ahead else 1  # the first one still verifies what was drafted before
        self._halves = halves
        self._step_latency = LatencyModel()
        self._propose_latency = LatencyModel(floor_seconds=0.5e-3, row_seconds=0.5e-4, grows_from_zero=True)
        self._acceptance = AcceptanceEstimator()
        self._speedup = SpeedupTracker()
        self._latest = TreeSizes((), 1.0, 1.0)
        self._budgets: dict[SequenceId, DraftBudget] = {}
        self._sizing_rounds_left = 0
        self._drafted_rounds = 0
        self._pruned_rounds = 0
        self._is_suspended = False
        self._expects_no_gain = True
        self._trial_sizings = 0
        self._present: frozenset[SequenceId] = frozenset()
        self._sized: frozenset[SequenceId] = frozenset()
        self._sized_rows = 0

    def start(self, profile: Iterable[StepSample]) -> None:
        """Start with the step durations that the target measured during warm-up."""
        self._step_latency = LatencyModel.of_profile(profile)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Drop the history of sequences that have ended."""
        self._acceptance.forget(sequence_ids)

    # --- the decision ---

    def decide(self, observation: Observation) -> WantedDrafts:
        """Learn from the round before, and return the trees of the next drafts. Call it once a round.

        Sequences that are missing get no draft. Trees are sized anew when other sequences decide, and now and then.
        """
        if observation.record is not None:
            self._observe_round(observation.record)
        if observation.probe is not None:
            self._observe_probe(observation.probe)
        self._meet(observation.present)
        if self._sizing_rounds_left <= 0 or self._is_another(observation):
            self._sized, self._sized_rows = _ids(observation.deciding), observation.rows
            self._size_trees(observation)
        return WantedDrafts(self._next_budgets(len(observation.deciding), observation.rows), NO_DRAFT)

    def _is_another(self, observation: Observation) -> bool:
        """Whether trees were sized for another number of sequences or, while there are drafts, for others."""
        if bucket_of(observation.rows) != bucket_of(self._sized_rows):
            return True
        return not (self.is_idle and self._sized) and _ids(observation.deciding) != self._sized

    def _observe_round(self, record: RoundRecord) -> None:
        """Record how long the round and its drafts took, and whether drafts save time."""
        for sample in (record.drafts.sample, record.drafting.sample):
            if sample is not None:
                self._propose_latency.observe(sample.rows, sample.depth, sample.seconds)
        drafting = record.drafting.seconds
        if record.reads_prompts:
            self._speedup.observe_lost(record.deciding, drafting)
        elif record.is_comparable:
            seconds = max(0.0, record.seconds - drafting)
            size = len(record.rows), record.tokens
            is_known = self._step_latency.knows_speed and self._step_latency.covers(record.tokens)
            expected = self._step_latency.seconds(*size) if is_known else math.inf
            self._step_latency.observe(*size, record.computing_seconds)
            if record.is_drafted:
                self._speedup.observe_drafted(record.deciding, seconds + drafting, record.committed)
            else:
                self._speedup.observe_plain(record.deciding, seconds, expected)

    def _observe_probe(self, probe: Probe) -> None:
        """Compare a probe with the tokens that the target decides, and learn how long it took.

        Other calls may have delayed it, so its time counts only if it is below the prediction.
        """
        for sequence_id, proposal in probe.proposals.items():
            self._acceptance.expect_verdicts((self._acceptance.estimate(probe.requests[sequence_id], proposal),))
        if not probe.proposals:
            return
        rows, depth = len(probe.requests), probe.depth
        if not self._propose_latency.has_samples or probe.seconds < self._propose_latency.seconds(rows, depth):
            self._propose_latency.observe(rows, depth, probe.seconds)
        self._sizing_rounds_left = min(self._sizing_rounds_left, PROBED_SIZING_ROUNDS)

    def _meet(self, present: frozenset[SequenceId]) -> None:
        """Let a sequence that begins alone have drafts again, unless earlier tries lost time.

        Texts differ: drafts that cost time for the last answer may save time for this one.
        """
        before, self._present = self._present, present
        begins_alone = len(present) == 1 and present.isdisjoint(before)
        if begins_alone and self.is_idle and self._propose_latency.has_samples and self._speedup.renew(1):
            self._is_suspended = self._expects_no_gain = False
            self._trial_sizings = TRIAL_SIZINGS

    def _next_budgets(self, deciding: int, rows: int) -> Mapping[SequenceId, DraftBudget]:
        """The budgets of the next round, in which `deciding` sequences decide, soon `rows`. Call it once a round."""
        self._sizing_rounds_left -= 1
        if not deciding:
            self._is_suspended = rows > 1 and self._speedup.pause(rows) > 0
            return {}
        is_paused = self._speedup.suspends(deciding)
        self._is_suspended = bool(self._budgets) and is_paused
        if not self._budgets or self._is_suspended:
            return {}
        self._drafted_rounds += 1
        period = CONTROL_ROUNDS * (SURE_FACTOR if self._latest.speedup >= SURE_SPEEDUP else 1)
        if self._speedup.controls(deciding, period, self._control_rounds):
            return {}
        if self._drafted_rounds % FULL_ROUNDS == 0:
            return dict.fromkeys(self._budgets, self.max_draft)
        return self._budgets

    # --- sizes ---

    def _size_trees(self, observation: Observation) -> None:
        """Size the trees of the sequences that decide and can have drafts."""
        rows = observation.rows
        requests = [
            DraftRequest(sequence, largest)
            for sequence in observation.deciding or observation.waiting
            if (largest := self._largest(sequence)).max_nodes
            and (
                self.is_idle
                or self.is_worth_prefilling(observation.prefill_seconds(sequence), rows, sequence.remaining)
            )
        ]
        self._sizing_rounds_left = SIZING_ROUNDS
        budgets = self._sizes(requests, rows) if requests else {}
        self._budgets = budgets if observation.deciding else {}
        deepest = max([budget.max_depth for budget in budgets.values()], default=0)
        if rows > 1 and not self._propose_latency.reaches(deepest):
            self._sizing_rounds_left = 1  # its time is a guess until the first sample
        if self._expects_no_gain or self._speedup.pause(rows):
            self._sizing_rounds_left *= IDLE_SIZING_FACTOR

    def _largest(self, sequence: core.Sequence) -> DraftBudget:
        return clip_draft(None, self.max_draft, sequence.request.max_draft_tokens, sequence.remaining)

    def _sizes(self, requests: Sequence[DraftRequest], rows: int) -> dict[SequenceId, DraftBudget]:
        """The budgets with the highest expected goodput. `rows` is how many sequences decide in the next step."""
        ids = [request.sequence.id for request in requests]
        if not self._propose_latency.has_samples or not self._step_latency.covers(rows):
            self._expects_no_gain = rows > EAGER_ROWS
            self._sizing_rounds_left = 1
            return {} if self._expects_no_gain else dict.fromkeys(ids, self.first_draft)
        forecasts = [self._acceptance.forecast(request) for request in requests]
        sizes = size_trees(forecasts, self._step_latency, self._propose_latency, rows)
        if self._halves and len(forecasts) > 1:
            half = size_trees(forecasts[: len(forecasts) // 2], self._step_latency, self._propose_latency, rows // 2)
            sizes = replace(sizes, goodput=half.goodput)  # compared with plain decoding of all rows together
        self._latest = sizes
        start, stop = (START_SPEEDUP, STOP_SPEEDUP) if rows > 1 else (START_SPEEDUP_ALONE, STOP_SPEEDUP_ALONE)
        self._expects_no_gain = sizes.speedup < (start if self._expects_no_gain else stop)
        trials, self._trial_sizings = self._trial_sizings, max(0, self._trial_sizings - 1)
        if self._expects_no_gain and trials and rows == 1 and not self._acceptance.knows(ids[0]):
            self._expects_no_gain = False
            return dict.fromkeys(ids, self.first_draft)
        if self._expects_no_gain:
            return {}
        if rows == 1 and self._speedup.pays(rows):
            # The drafter computes the gain of one more pass from the tree itself. The forecast is a mean of many trees.
            return dict.fromkeys(ids, self.max_draft)
        return {
            sequence_id: budget_for(nodes, forecast.depths[nodes - 1])
            for nodes, forecast, sequence_id in zip(sizes.nodes, forecasts, ids, strict=True)
            if nodes
        }

    # --- what is known ---

    @property
    def is_idle(self) -> bool:
        """Whether speculation costs time at present, or was not measured yet."""
        return self._expects_no_gain or self._is_suspended

    def resumes_soon(self, rows: int) -> bool:
        """Whether a suspension for `rows` rows ends within `EVIDENCE_ROUNDS` rounds."""
        return 0 < self._speedup.pause(rows) <= EVIDENCE_ROUNDS

    def starts_with_drafts(self, rows: int) -> bool:
        """Whether a sequence that begins to decode in a step of `rows` rows is drafted for before it is sized."""
        if not self._propose_latency.has_samples:
            return rows <= EAGER_ROWS
        return not self.is_idle and not self._speedup.pause(rows)

    def propose_seconds(self, rows: int, depth: int) -> float:
        """Expected time of proposals for `rows` sequences, in seconds; 0 if nothing was measured."""
        return self._propose_latency.seconds(rows, depth) if self._propose_latency.has_samples else 0.0

    def is_worth_prefilling(self, seconds: float, rows: int, remaining: int) -> bool:
        """Whether drafts save more time than the `seconds` that a drafter takes to prefill the sequence.

        The saving is a share of the sequence's part in the steps of its next tokens; half of the `remaining` tokens are
        counted. A single sequence counts in full, because otherwise its drafts would never be observed.
        """
        if not self._propose_latency.has_samples or not self._step_latency.has_samples:
            return True
        share = self._step_latency.seconds(rows, rows) / rows
        saved = 1.0 if rows == 1 else max(0.0, 1 - 1 / self._latest.speedup)
        return seconds <= remaining / 2 * share * saved

    def patience(self, rows: int, depth: int) -> float:
        """How long to wait for proposals, in seconds."""
        if not self._propose_latency.has_samples:
            return float("inf")
        return max(MIN_PATIENCE_SECONDS, PATIENCE * self._propose_latency.seconds(rows, depth))

    # --- with proposals: pruning ---

    def prune(
        self,
        asked: Mapping[SequenceId, DraftRequest],
        proposals: Mapping[SequenceId, Proposal],
        *,
        rows: int,
        tokens: int,
        waited: float,
    ) -> PrunedDrafts:
        """Keep the nodes that raise goodput in a step of `tokens` other tokens in which `rows` sequences decide.

        `waited` is how long this round has waited for proposals, in seconds.
        """
        drafts = [
            self._acceptance.estimate(request, proposal)
            for sequence_id, request in asked.items()
            if (proposal := proposals.get(sequence_id)) is not None
        ]
        if drafts:
            every = -(-len(drafts) // LEARNED_TREES)
            self._acceptance.expect_verdicts(drafts[self._pruned_rounds % every :: every])
        self._pruned_rounds += 1
        whole = {index for index, draft in enumerate(drafts) if not draft.proposal.is_prunable}
        trees = [draft.probabilities for draft in drafts]
        pruned = prune_trees(trees, self._step_latency, rows, tokens, waited, whole)
        kept = {
            draft.request.sequence.id: draft.proposal.subset(nodes)
            for draft, nodes in zip(drafts, pruned.nodes, strict=True)
            if nodes
        }
        return PrunedDrafts(kept, pruned.seconds)

    def learn(self) -> None:
        """Learn from the trees on which the target has decided. It takes longest of all, so call it during a step."""
        self._acceptance.learn()


def _ids(sequences: Iterable[core.Sequence]) -> frozenset[SequenceId]:
    return frozenset([sequence.id for sequence in sequences])


class LargestTrees:
    """Drafts as large as they may be, always (`draft.controller: off`)."""

    is_adaptive = False
    is_idle = False

    def __init__(self, max_draft: DraftBudget) -> None:
        self.max_draft = self.first_draft = max_draft
        self._wanted = WantedDrafts({}, None)

    def start(self, profile: Iterable[StepSample]) -> None:
        """Ignore the profile."""

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Nothing is stored."""

    def decide(self, observation: Observation) -> WantedDrafts:  # noqa: ARG002 - the controller's signature
        """The largest trees, for every sequence."""
        return self._wanted

    def prune(
        self,
        asked: Mapping[SequenceId, DraftRequest],  # noqa: ARG002
        proposals: Mapping[SequenceId, Proposal],
        *,
        rows: int,  # noqa: ARG002
        tokens: int,  # noqa: ARG002
        waited: float,  # noqa: ARG002
    ) -> PrunedDrafts:
        """All nodes."""
        return PrunedDrafts(dict(proposals))

    def learn(self) -> None:
        """Learn nothing."""

    def starts_with_drafts(self, rows: int) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def resumes_soon(self, rows: int) -> bool:  # noqa: ARG002
        """Never: nothing is suspended."""
        return False

    def propose_seconds(self, rows: int, depth: int) -> float:  # noqa: ARG002
        """0: nothing is measured."""
        return 0.0

    def is_worth_prefilling(self, seconds: float, rows: int, remaining: int) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def patience(self, rows: int, depth: int) -> float:  # noqa: ARG002
        """No bound of its own."""
        return float("inf")


Controller = SpeculationController | LargestTrees
"""Decides the sizes of drafts. `decide` is called once a round; apart from it, `prune` and `learn`, calls only read."""
