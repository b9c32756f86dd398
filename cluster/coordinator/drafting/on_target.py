"""Drafts of a drafter on the target: asked for with one step's rows, received with its verdicts.

No call is made for them. A draft is used in the next round, or dropped when the sequence has another length by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from cluster.coordinator.clients.drafter import Proposals, checked
from cluster.coordinator.clients.drafter_pool import PREFILL_TOKENS
from cluster.coordinator.drafting.draft_source import Proposed, deepest, draft_requests, within
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core import sequence as core
from cluster.core.drafting import EVIDENCE_ONLY, NO_DRAFT, DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow, WantedDrafts
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepResult, VerifyRow
from cluster.speculation.constants import CATCH_UP_RATE
from cluster.speculation.controller import Controller
from cluster.speculation.observation import DraftSample, DraftTime, Probe, RoundDrafts


class DraftsOnTarget:
    """Chooses the budgets that rows bring to the target, and collects the proposals in verdicts. A `DraftSource`."""

    def __init__(self, controller: Controller, running: Mapping[SequenceId, LiveSequence], metrics: Metrics) -> None:
        self._controller = controller
        self._running = running
        self._metrics = metrics
        self._vocabulary_size = 0
        self._wanted: Mapping[SequenceId, DraftBudget] = {}
        """Budgets that the controller chose for the drafts of the next step."""
        self._requested: Mapping[SequenceId, DraftBudget] = {}
        """Budgets of the drafts that the target has proposed with the latest step, without those of a probe."""
        self._proposals: Proposals = {}
        self._catch_up = _CatchUp(running)
        self._probing: Mapping[SequenceId, DraftRequest] = {}
        """The requests of a probe that waits for its step."""
        self._probed: set[SequenceId] = set()
        """Sequences of that probe that have not ended."""
        self._probe: Probe | None = None
        """The probe that has ended."""

    @property
    def is_idle(self) -> bool:
        """Whether no probe waits for its step."""
        return not self._probing

    @property
    def wants_following(self) -> bool:
        """No: the target tells its drafter."""
        return False

    def start(self, vocabulary_size: int) -> None:
        """Keep the size of the vocabulary. A new target has no drafts yet."""
        self._vocabulary_size = vocabulary_size
        self._proposals.clear()
        self._end_probe({}, 0.0)

    def plan_with(self, wanted: WantedDrafts) -> WantedDrafts:
        """The trees that the latest step has brought: the target drafts one round ahead."""
        self._wanted = wanted.budgets
        return WantedDrafts(self._requested, NO_DRAFT) if self._controller.is_adaptive else wanted

    def split(self, plan: Plan) -> tuple[Plan, Plan]:
        """All rows are of this round."""
        return plan, Plan()

    async def propose(self, rows: Iterable[PlannedRow], patience: Callable[[int, int], float]) -> Proposed:  # noqa: ARG002
        """The drafts that the last step brought, as far as they fit the rows. The step spends time on the next ones."""
        requests = draft_requests(rows, self._running)
        if not requests:
            return Proposed()
        found: Proposals = {}
        for sequence_id, request in requests.items():
            proposal = self._proposals.pop(sequence_id, None)
            if proposal is None:
                continue
            if proposal.base_len == len(request.sequence):
                found[sequence_id] = checked(proposal, request.budget, self._vocabulary_size)
            else:
                self._metrics.stale_proposal()
        return Proposed(requests, found, self._controller.propose_seconds(len(requests), deepest(requests)))

    # --- with a step ---

    def next_budgets(self, plan: Plan, probed: Collection[SequenceId]) -> Mapping[SequenceId, DraftBudget]:
        """The budgets of the plan's rows. Rows without a draft and without evidence for the drafter are missing.

        Rows of which the drafter will need what the step shows have the budget `EVIDENCE_ONLY`, those that will be
        `probed` too. Sequences of a probe have its budget.
        """
        controller, rows = self._controller, len(plan.rows)
        starts = controller.starts_with_drafts(max(rows, len(self._running)))
        is_active = starts or not controller.is_idle
        resumes = controller.resumes_soon(rows)
        wanted: dict[SequenceId, DraftBudget] = {}
        shown: dict[SequenceId, DraftBudget] = {}
        for row in plan.rows if is_active or resumes or probed or self._wanted else ():
            live = self._running.get(row.sequence_id)
            if live is None:
                continue
            largest = live.largest_draft(controller.max_draft)
            is_worth = is_active and self._is_worth_catching_up(live, rows)
            # A drafter takes long to catch up on a prompt, so it is shown prompts only while there are drafts.
            is_near = (resumes or live.id in probed) and row.decide and row.pending == 1
            if largest.max_nodes and (is_worth or is_near):
                shown[live.id] = EVIDENCE_ONLY
            budget = self._budget(row, largest, starts=starts)
            if budget.max_nodes and (is_worth or self._is_worth_catching_up(live, rows)):
                wanted[live.id] = budget
        self._requested = wanted
        return {**shown, **{name: request.budget for name, request in self._probing.items()}, **wanted}

    def _budget(self, row: PlannedRow, largest: DraftBudget, *, starts: bool) -> DraftBudget:
        if not row.decide:
            return NO_DRAFT
        sized = self._wanted.get(row.sequence_id)
        if sized is not None:
            return within(sized, largest)
        if starts and (row.pending > 1 or not self._controller.is_adaptive):
            return within(self._controller.first_draft, largest)  # it was not sized yet, because it did not decide
        return NO_DRAFT

    def _is_worth_catching_up(self, live: LiveSequence, rows: int) -> bool:
        """Whether drafts will save more time than the first one takes because it computes what came before it."""
        seconds = self._catch_up.seconds(live)
        return not seconds or self._controller.is_worth_prefilling(seconds, rows, live.sequence.remaining)

    def work_during_step(self, later: Plan, unprefilled: Iterable[core.Sequence]) -> None:
        """Nothing: the step itself brings the drafter up to date."""

    def receive(self, rows: Sequence[VerifyRow], step: StepResult, drafts: RoundDrafts) -> DraftTime:  # noqa: ARG002
        """Take the proposals of a step. A probe does not count as drafts that were asked for."""
        budgets = {row.sequence_id: row.next_budget for row in rows if row.next_budget.max_nodes}
        prompts = [row.sequence_id for row in rows if row.next_budget == EVIDENCE_ONLY and len(row.pending) > 1]
        depth = max([budget.max_depth for budget in budgets.values()], default=0)
        expected = self._controller.propose_seconds(len(budgets), depth) if budgets else 0.0
        # A prompt that the drafter reads in the same step makes drafts look slow, but never fast.
        is_undisturbed = not prompts or not expected or step.draft_seconds <= expected
        is_usual = self._catch_up.is_done(budgets) and is_undisturbed
        self._catch_up.end(budgets, prompts, step.draft_seconds - expected)
        if not budgets:
            return DraftTime(step.draft_seconds)
        arrived: Proposals = {
            verdict.sequence_id: verdict.proposal
            for verdict in step.verdicts
            if verdict.proposal is not None and verdict.sequence_id in budgets
        }
        self._proposals.update(arrived)
        self._metrics.drafter_worked(step.draft_seconds)
        if not budgets.keys().isdisjoint(self._probing):
            probed = {
                name: checked(proposal, budgets[name], self._vocabulary_size)
                for name, proposal in arrived.items()
                if name in self._probing
            }
            self._end_probe(probed, step.draft_seconds)
        sample = DraftSample(len(budgets), depth, step.draft_seconds) if is_usual else None
        return DraftTime(step.draft_seconds, sample, not budgets.keys().isdisjoint(self._requested))

    # --- probes ---

    def probe(self, requests: Mapping[SequenceId, DraftRequest]) -> bool:
        """Ask for drafts with the next step."""
        self._probing, self._probed = dict(requests), set(requests)
        return bool(requests)

    def take_probe(self) -> Probe | None:
        """The probe, once after its step or after the end of its sequences."""
        probe, self._probe = self._probe, None
        return probe

    def _end_probe(self, proposals: Proposals, seconds: float) -> None:
        if self._probing:
            self._probe = Probe(self._probing, proposals, seconds)
            self._probing = {}

    def prefill_seconds(self, sequence: core.Sequence) -> float:  # noqa: ARG002 - the port's signature
        """0: every step brings the drafter up to date."""
        return 0.0

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Drop the drafts of sequences that have ended. The target releases its own state with their KV."""
        for sequence_id in sequence_ids:
            self._proposals.pop(sequence_id, None)
            self._probed.discard(sequence_id)
            self._catch_up.forget(sequence_id)
        if not self._probed:
            self._end_probe({}, 0.0)

    async def close(self, timeout_seconds: float) -> None:
        """Nothing: no call is under way."""


class _CatchUp:
    """How much longer drafts take until the first one of a sequence: what came before it is computed, too."""

    def __init__(self, running: Mapping[SequenceId, LiveSequence]) -> None:
        self._running = running
        self._done: set[SequenceId] = set()
        self._earlier: dict[SequenceId, float] = {}
        """Time that the drafter has spent on sequences before their first draft, in seconds."""
        self._token_seconds = 0.0
        """Mean time for each token that a sequence has at its first draft, in seconds."""

    def seconds(self, live: LiveSequence) -> float:
        """Expected time until the first draft of a sequence, beyond that of a later one; 0 if none is left."""
        if self._is_done(live.id):
            return 0.0
        return max(0.0, self._token_seconds * len(live.sequence) - self._earlier.get(live.id, 0.0))

    def is_done(self, sequence_ids: Iterable[SequenceId]) -> bool:
        """Whether drafts for the sequences compute little that came before them."""
        return all(map(self._is_done, sequence_ids))

    def end(self, drafted: Iterable[SequenceId], prompts: Sequence[SequenceId], extra_seconds: float) -> None:
        """Record a step with drafts for some sequences and the prompts of others, and what it took beyond the expected.

        The time is shared evenly, because the drafter does not tell what each sequence took.
        """
        first = [sequence_id for sequence_id in drafted if not self._is_done(sequence_id)]
        share = max(0.0, extra_seconds) / max(1, len(first) + len(prompts))
        for sequence_id in prompts:
            self._earlier[sequence_id] = self._earlier.get(sequence_id, 0.0) + share
        if first:
            spent = share * len(first) + sum(self._earlier.pop(sequence_id, 0.0) for sequence_id in first)
            mean = spent / sum(len(self._running[sequence_id].sequence) for sequence_id in first)
            self._token_seconds += (CATCH_UP_RATE if self._token_seconds else 1.0) * (mean - self._token_seconds)
        self._done.update(drafted)

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop the state of a sequence that has ended."""
        self._done.discard(sequence_id)
        self._earlier.pop(sequence_id, None)

    def _is_done(self, sequence_id: SequenceId) -> bool:
        live = self._running.get(sequence_id)
        return sequence_id in self._done or live is None or len(live.sequence) <= PREFILL_TOKENS
