"""The speculation controller: how large trees should be, which nodes to verify, and whether drafts pay at all.

The controller has no clock and calls no worker. It turns observations into decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.drafting import DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepSample
from cluster.speculation.estimator import AcceptanceEstimator
from cluster.speculation.goodput import TreeSizes, budget_for, prune_trees, size_trees
from cluster.speculation.latency import LatencyModel
from cluster.speculation.speedup import SpeedupTracker

SIZING_ROUNDS = 4
"""Rounds for which tree sizes hold while the same sequences decide."""
IDLE_SIZING_FACTOR = 4
"""How many times longer tree sizes hold while nothing is drafted."""
PROBED_SIZING_ROUNDS = 2
"""Rounds after a background probe until trees are sized anew. The target has decided on the probe by then."""
START_SPEEDUP, START_SPEEDUP_ALONE = 1.15, 1.03
"""Expected speed-up over plain decoding from which speculation starts. A single sequence needs less, because the
drafter then prefills only one prompt."""
STOP_SPEEDUP, STOP_SPEEDUP_ALONE = 1.05, 1.01
"""Expected speed-up over plain decoding below which speculation stops."""
CONTROL_ROUNDS = 64
"""Rounds with drafts after which one round has none, so that the time of plain decoding stays known."""
SURE_SPEEDUP = 1.5
"""From this expected speed-up on, rounds without drafts are `SURE_FACTOR` times less frequent."""
SURE_FACTOR = 4
"""How many times less frequent rounds without drafts are from `SURE_SPEEDUP` on."""
FULL_ROUNDS = 48
"""Rounds with drafts after which one round requests the largest trees, so that their value stays known."""
EAGER_ROWS = 4
"""Up to this many sequences request the largest trees before anything is observed, to learn fast at low cost."""
PATIENCE = 4.0
"""A round waits for proposals at most this many times their expected time."""
MIN_PATIENCE_SECONDS = 0.01
"""Shortest bound on the wait for proposals, in seconds."""
EVIDENCE_ROUNDS = 16
"""Rounds before a first draft in which a drafter on the target is shown the steps, so that it knows a context."""
REST_ROUNDS = 8
"""Most rounds in which nothing is decided about drafts, while they do not pay."""
TRIAL_SIZINGS = 2
"""How often a sequence that begins alone gets first drafts although those before it had no gain from drafts."""
_LEARNED_TREES = 8
"""Most trees per round that the controller learns from, spread over the sequences, to bound the time that it takes."""


@dataclass(frozen=True, slots=True)
class PrunedDrafts:
    """The proposals to verify, and the expected time of their step."""

    proposals: dict[SequenceId, Proposal] = field(default_factory=dict)
    step_seconds: float = 0.0


class SpeculationController:
    """Sizes and prunes trees by the observed latency, acceptance and speed-up."""

    def __init__(
        self, max_draft: DraftBudget, first_draft: DraftBudget | None = None, *, is_ahead: bool = False
    ) -> None:
        """`first_draft` is the largest tree while nothing is known of proposals; unset: `max_draft`.

        `is_ahead` says that the budgets of a round are for the drafts of the next one.
        """
        self._control_rounds = 2 if is_ahead else 1  # the first one still verifies what was drafted before
        self._max_draft = max_draft
        self._first_draft = first_draft or max_draft
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

    def start(self, profile: Iterable[StepSample]) -> None:
        """Start with the step durations that the target measured during warm-up."""
        self._step_latency = LatencyModel.of_profile(profile)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Drop the history of sequences that have ended."""
        self._acceptance.forget(sequence_ids)

    # --- before proposals: sizes ---

    def meet(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Tell which sequences run or wait. One that begins alone has drafts again, unless earlier tries owe time.

        Texts differ: drafts that did not pay for the last answer may pay for this one.
        """
        before, self._present = self._present, frozenset(sequence_ids)
        begins_alone = len(self._present) == 1 and self._present.isdisjoint(before)
        if begins_alone and self.is_idle and self._propose_latency.has_samples and self._speedup.renew(1):
            self._is_suspended = self._expects_no_gain = False
            self._trial_sizings = TRIAL_SIZINGS

    @property
    def is_idle(self) -> bool:
        """Whether speculation does not pay at present, or nothing is known of it yet."""
        return self._expects_no_gain or self._is_suspended

    def resumes_soon(self, rows: int) -> bool:
        """Whether a suspension for `rows` rows ends at most `EVIDENCE_ROUNDS` rounds after a rest that begins now."""
        return self._speedup.resumes_within(rows, EVIDENCE_ROUNDS + REST_ROUNDS)

    def idle_rounds(self, rows: int) -> int:
        """For how many rounds of `rows` rows nothing has to be decided, if other sequences do not come; often 0."""
        if not self.is_idle or not self._propose_latency.has_samples or self._acceptance.is_waiting:
            return 0
        paused = self._speedup.pause(rows) if self._is_suspended else self._sizing_rounds_left
        return max(0, min(paused, self._sizing_rounds_left))

    def pass_rounds(self, rows: int, rounds: int) -> None:
        """Tell that `rounds` rounds of `rows` rows have passed for which `next_budgets` was not called."""
        self._sizing_rounds_left -= rounds
        self._speedup.count_down(rows, rounds)

    @property
    def needs_sizing(self) -> bool:
        """Whether trees must be sized anew."""
        return self._sizing_rounds_left <= 0

    def size_trees(self, requests: Sequence[DraftRequest], rows: int, *, halves: bool = False) -> None:
        """Size the trees of `requests` anew. Each has the largest budget that its sequence can use.

        `rows` is how many sequences decide in the next step. With `halves`, only every other one is in the same step.
        """
        self._sizing_rounds_left = SIZING_ROUNDS
        self._budgets = self._size(requests, rows, halves=halves) if requests else {}
        if self._expects_no_gain or self._speedup.pause(rows):
            self._sizing_rounds_left *= IDLE_SIZING_FACTOR

    def next_budgets(self, rows: int) -> Mapping[SequenceId, DraftBudget]:
        """The budgets of the next round, in which `rows` sequences decide. Sequences that are missing get no draft.

        Call it once per round.
        """
        self._sizing_rounds_left -= 1
        is_paused = self._speedup.suspends(rows)
        self._is_suspended = bool(self._budgets) and is_paused
        if not self._budgets or self._is_suspended:
            return {}
        self._drafted_rounds += 1
        period = CONTROL_ROUNDS * (SURE_FACTOR if self._latest.speedup >= SURE_SPEEDUP else 1)
        if (self._drafted_rounds + self._control_rounds - 1) % period < self._control_rounds:
            return {}
        if self._drafted_rounds % FULL_ROUNDS == 0:
            return dict.fromkeys(self._budgets, self._max_draft)
        return self._budgets

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

    def _size(self, requests: Sequence[DraftRequest], rows: int, *, halves: bool) -> dict[SequenceId, DraftBudget]:
        if not self._propose_latency.has_samples or not self._step_latency.covers(rows):
            self._expects_no_gain = rows > EAGER_ROWS
            self._sizing_rounds_left = 1
            return {} if self._expects_no_gain else dict.fromkeys(self._ids(requests), self._first_draft)
        forecasts = [self._acceptance.forecast(request) for request in requests]
        sizes = size_trees(forecasts, self._step_latency, self._propose_latency, rows)
        if halves and len(forecasts) > 1:
            half = size_trees(forecasts[: len(forecasts) // 2], self._step_latency, self._propose_latency, rows // 2)
            sizes = replace(sizes, goodput=half.goodput)  # compared with plain decoding of all rows together
        self._latest = sizes
        start, stop = (START_SPEEDUP, STOP_SPEEDUP) if rows > 1 else (START_SPEEDUP_ALONE, STOP_SPEEDUP_ALONE)
        self._expects_no_gain = sizes.speedup < (start if self._expects_no_gain else stop)
        trials, self._trial_sizings = self._trial_sizings, max(0, self._trial_sizings - 1)
        if self._expects_no_gain and trials and rows == 1 and not self._acceptance.knows(requests[0].sequence.id):
            self._expects_no_gain = False
            return dict.fromkeys(self._ids(requests), self._first_draft)
        if self._expects_no_gain:
            return {}
        if rows == 1 and self._speedup.pays(rows):
            # The drafter knows from the tree itself what one more pass is worth. The forecast is a mean of many trees.
            return dict.fromkeys(self._ids(requests), self._max_draft)
        return {
            request.sequence.id: budget_for(nodes, forecast.depths[nodes - 1])
            for nodes, forecast, request in zip(sizes.nodes, forecasts, requests, strict=True)
            if nodes
        }

    @staticmethod
    def _ids(requests: Sequence[DraftRequest]) -> list[SequenceId]:
        return [request.sequence.id for request in requests]

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
            every = -(-len(drafts) // _LEARNED_TREES)
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

    # --- after the step: learning ---

    def observe_probe(self, request: DraftRequest, proposal: Proposal) -> None:
        """Add a proposal that is not verified. It is compared with the tokens that the target decides."""
        self._acceptance.expect_verdicts((self._acceptance.estimate(request, proposal),))

    def observe_round(
        self, rows: int, tokens: int, seconds: float, *, waited: float, committed: int, is_drafted: bool
    ) -> None:
        """Add a round without prompts.

        `tokens` is the size of its step, `seconds` its time without the `waited` seconds for proposals, and `committed`
        the tokens that it committed.
        """
        self._step_latency = self._step_latency.observed(rows, tokens, seconds)
        if is_drafted:
            self._speedup.observe_drafted(rows, seconds + waited, committed)
        else:
            self._speedup.observe_plain(rows, seconds)

    def observe_plain(self, rows: int, seconds: float, rounds: int) -> None:
        """Add `rounds` rounds without prompts and drafts, which took `seconds` seconds on average."""
        self._step_latency = self._step_latency.observed(rows, rows, seconds)
        self._speedup.observe_plain(rows, seconds, rounds)

    def observe_lost(self, rows: int, seconds: float) -> None:
        """Add time that drafting took in a round that is left out, in seconds."""
        self._speedup.observe_lost(rows, seconds)

    def observe_wait(self, rows: int, depth: int, seconds: float) -> None:
        """Add a wait for the proposals of `rows` sequences whose deepest budget was `depth`."""
        self._propose_latency = self._propose_latency.observed(rows, depth, seconds)

    def observe_probe_latency(self, rows: int, depth: int, seconds: float) -> None:
        """Add the time of a probe. Other calls may have delayed it, so it counts only if it is below the prediction."""
        if not self._propose_latency.has_samples or seconds < self._propose_latency.seconds(rows, depth):
            self._propose_latency = self._propose_latency.observed(rows, depth, seconds)
        self._sizing_rounds_left = min(self._sizing_rounds_left, PROBED_SIZING_ROUNDS)

    def learn(self) -> None:
        """Learn from the trees on which the target has decided since the last call."""
        self._acceptance.learn()
