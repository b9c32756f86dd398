"""What the scheduler decides on, and what it decides: frozen values. Lengths are in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.core.config.sections import SchedulerSection
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy


@dataclass(frozen=True, slots=True)
class SequenceView:
    """The scheduler's view of one sequence. Lengths are in tokens."""

    id: SequenceId
    arrival: int
    """Order of arrival: smaller is older."""
    length: int
    """Committed tokens, prompt and answer together."""
    stored_len: int
    """Leading tokens whose KV the target holds; less than `length`."""
    remaining: int
    """Tokens that the answer may still have."""
    shared_len: int = 0
    """Leading tokens of a waiting sequence whose blocks another sequence already holds and will share."""
    draft: DraftBudget | None = None
    """The tree size that the speculation controller chose; `None` means the largest tree allowed."""
    max_draft_tokens: int | None = None
    """Most nodes of a tree that the request allows; `None` leaves it to the server."""
    source_len: int = 0
    """Tokens that an encoder must read before the first row of the sequence. They take blocks as its own tokens do."""
    forced: int = 0
    """Tokens that the grammar forces next. A chain of them is verified even where no other draft is wanted."""
    turn: int = 0
    """When it is the turn of its client, see `FairQueue`: smaller goes first, and of equal turns the older one."""
    priority: int = 0
    """The priority of the request: smaller goes first, whatever the turn."""
    goes_last: bool = False
    """Whether its prompt gets only what other prompts leave of a step: the target is not ready for it."""

    @property
    def missing(self) -> int:
        """Committed tokens without stored KV: 1 while decoding, more during prefill."""
        return self.length - self.stored_len


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a plan depends on."""

    waiting: tuple[SequenceView, ...]
    running: tuple[SequenceView, ...]
    kv: KvOccupancy
    """The block counts that the target reported last."""
    layout: KvLayout
    max_context_len: int
    """Longest sequence that the target computes, in tokens."""
    limits: SchedulerSection
    max_draft: DraftBudget
    """The largest tree that any sequence may have."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One running sequence's part in the step."""

    sequence_id: SequenceId
    pending: int
    """Number of missing tokens that the row sends, counted from the first missing one."""
    decide: bool
    """Whether the pending tokens reach the end of the sequence, so that the target decides the next token."""
    draft: DraftBudget
    """The largest tree that a drafter may propose for the row."""
    forced: int = 0
    """Forced tokens that the row verifies, in addition to the tree or as a part of it."""

    @property
    def wants_draft(self) -> bool:
        """Whether the row decides and may have a tree."""
        return self.decide and self.draft.max_nodes > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step: preempt, admit, then compute `rows`, which are in order of arrival."""

    admit: tuple[SequenceId, ...] = ()
    preempt: tuple[SequenceId, ...] = ()
    rows: tuple[PlannedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """The tree sizes that the speculation controller chose. `clip_draft` bounds them later."""

    budgets: Mapping[SequenceId, DraftBudget]
    default: DraftBudget | None
    """Budget of sequences that are not in `budgets`; `None` means the largest tree allowed."""

    def of(self, sequence_id: SequenceId) -> DraftBudget | None:
        """The wanted budget of one sequence."""
        return self.budgets.get(sequence_id, self.default)
