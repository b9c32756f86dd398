"""What a round shows: one record that tracing, metrics and the speculation controller read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cluster.core import sequence as core
from cluster.core.drafting import DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.sequence import DraftRequest
from cluster.core.verification import StepResult, VerifyRow


@dataclass(frozen=True, slots=True)
class DraftSample:
    """How long the drafts of several sequences took together."""

    rows: int
    """Number of sequences."""
    depth: int
    """Depth of the deepest tree that was asked for, in tokens."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundDrafts:
    """The drafts of one round, complete before its step."""

    proposals: Mapping[SequenceId, Proposal] = field(default_factory=dict)
    """The drafts to verify."""
    asked: int = 0
    """Number of sequences that were drafted for."""
    waited: float = 0.0
    """Time that the round waited for proposals, in seconds. For drafts on the target, the expected time."""
    sample: DraftSample | None = None
    """The wait, if it shows how long proposals take."""
    step_seconds: float | None = None
    """Expected time of the step, in seconds; `None` without a controller."""
    forced: Mapping[SequenceId, int] = field(default_factory=dict)
    """Number of tokens that grammars force next, of the sequences that have any."""
    next_budgets: Mapping[SequenceId, DraftBudget] = field(default_factory=dict)
    """Largest trees that a drafter on the target proposes with this step, for the next round."""
    later: int = 0
    """Number of sequences that decide in the next round instead, because they are drafted for in this one."""
    wants_following: bool = False
    """Whether drafters elsewhere want to know what the grammars of sequences allow after the step."""


@dataclass(frozen=True, slots=True)
class DraftTime:
    """What drafting cost a round, known after its step."""

    seconds: float = 0.0
    """Part of the round's time that went into drafts, in seconds."""
    sample: DraftSample | None = None
    """The time, if it shows how long proposals take."""
    has_asked: bool = False
    """Whether the round asked for drafts to verify, or waited for them."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """When the stages of a round began, in seconds on the coordinator's clock."""

    plan: float
    propose: float
    verify: float
    commit: float
    """When the verdicts arrived."""
    end: float
    """When the tokens had been handed to the readers."""


@dataclass(frozen=True)
class RoundRecord:
    """One round of the coordinator, complete at its end. What several readers ask for is computed once."""

    rows: tuple[VerifyRow, ...]
    step: StepResult
    drafts: RoundDrafts
    drafting: DraftTime
    times: RoundTimes

    @property
    def seconds(self) -> float:
        """Time of the whole round, in seconds."""
        return self.times.end - self.times.plan

    @property
    def step_seconds(self) -> float:
        """Time that the round waited for verdicts, in seconds."""
        return self.times.commit - self.times.verify

    @property
    def computing_seconds(self) -> float:
        """Time that the step takes without drafts, in seconds: that of the round without its drafts.

        A target may have computed a part of the step while the round waited for drafts. Then its own time counts.
        """
        target = self.step.step_seconds - self.step.draft_seconds
        return max(0.0, self.seconds - self.drafting.seconds, target)

    @cached_property
    def tokens(self) -> int:
        """Tokens in the step: prompt chunks, last tokens and trees."""
        return sum([row.width for row in self.rows])

    @property
    def useful_tokens(self) -> int:
        """Prompt tokens that the step computed, and tokens that its verdicts decided."""
        prompts = sum([len(row.pending) for row in self.rows if len(row.pending) > 1 or not row.decide])
        return prompts + sum([len(verdict.tokens) for verdict in self.step.verdicts])

    @cached_property
    def reads_prompts(self) -> bool:
        """Whether the step computed more than the last token of a sequence."""
        return any(len(row.pending) > 1 or not row.start_len for row in self.rows)

    @property
    def deciding(self) -> int:
        """Number of sequences that would have been in the round without drafts."""
        return len(self.rows) + self.drafts.later

    @cached_property
    def is_drafted(self) -> bool:
        """Whether the round had drafts, waited for them, or went without sequences that were drafted for.

        Tokens that grammars force are no drafts.
        """
        is_partial = self.drafting.has_asked or self.drafts.later > 0
        return is_partial or self.tokens > len(self.rows) + self._forced_nodes

    @property
    def is_comparable(self) -> bool:
        """Whether the time of the round can be compared with other rounds.

        A round that reads prompts is like no other, and so is one that verifies nothing but forced tokens.
        """
        return not self.reads_prompts and (self.is_drafted or not self._forced_nodes)

    @property
    def committed(self) -> int:
        """Tokens that the step decided, without those that grammars forced: they come without drafts too."""
        forced = self.drafts.forced
        return sum(
            [
                len(verdict.tokens) - min(verdict.accepted, forced.get(verdict.sequence_id, 0))
                for verdict in self.step.verdicts
            ]
        )

    @property
    def _forced_nodes(self) -> int:
        forced = self.drafts.forced
        return sum([forced.get(row.sequence_id, 0) for row in self.rows]) if forced else 0


@dataclass(frozen=True, slots=True)
class Probe:
    """Drafts that were made in the background and are not verified."""

    requests: Mapping[SequenceId, DraftRequest]
    proposals: Mapping[SequenceId, Proposal]
    """The drafts that arrived; empty if the drafter failed."""
    seconds: float
    """How long they took, in seconds."""

    @property
    def depth(self) -> int:
        """Depth of the deepest requested tree, in tokens."""
        return max((request.budget.max_depth for request in self.requests.values()), default=0)


@dataclass(frozen=True, slots=True)
class Observation:
    """All that the speculation controller decides on before a round."""

    present: frozenset[SequenceId]
    """Sequences that run or wait, and are not finished."""
    deciding: Sequence[core.Sequence]
    """Sequences for which the target decides in the next step, if nothing else happens."""
    rows: int
    """Number of sequences that are expected to decide soon: those, and those that wait or prefill."""
    waiting: Sequence[core.Sequence] = ()
    """Several sequences that wait or prefill, while none decides."""
    record: RoundRecord | None = None
    """The round before; `None` if there was none since the last decision."""
    probe: Probe | None = None
    """The probe that has ended since the last decision."""
    prefill_seconds: Callable[[core.Sequence], float] = lambda _: 0.0
    """Expected time until a drafter has computed the prompt of a sequence, in seconds."""
