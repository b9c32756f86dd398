"""The scheduler: which rows the next step has, as a pure function of frozen values.

Sequences are served by priority, then by their clients' turns, then by arrival (`FairQueue`): "older" means this order.
Every step first gives each decoding sequence one token. Half of the tokens left are reserved for the oldest sequence
that still prefills. Draft trees share the others evenly. Prompt chunks use the tokens that the trees leave. While other
sequences decode, all prompts together take at most `max_prompt_tokens` of a step, so that a new request does not
lengthen the time between the tokens of the others (chunked prefill, as in Sarathi-Serve, Agrawal et al. 2024). Blocks
are allocated on demand. When they run out, the latest is preempted, so that the oldest sequence can always finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.core.config.sections import SchedulerSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
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
    """Tokens that an encoder must read before a waiting sequence starts. They take blocks as a sequence's tokens do."""
    forced: int = 0
    """Tokens that the grammar forces next. A chain of them is verified even where no other draft is wanted."""
    turn: int = 0
    """When it is the turn of its client, see `FairQueue`: smaller goes first, and of equal turns the older one."""
    priority: int = 0
    """That of its request: smaller goes first, whatever the turn."""

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


def clip_draft(
    wanted: DraftBudget | None, max_draft: DraftBudget, max_draft_tokens: int | None, remaining: int
) -> DraftBudget:
    """Return the largest tree that one sequence can use. All bounds on a draft budget are applied here.

    `wanted` is the speculation controller's choice (`None` for no choice), `max_draft` the configuration's bound and
    `max_draft_tokens` the request's. `remaining` is the number of tokens that the answer may still get. The last of
    them is always the target's own, so a tree is less deep than `remaining`.
    """
    nodes, depth = max_draft.max_nodes, min(max_draft.max_depth, remaining - 1)
    if wanted is not None:
        nodes, depth = min(nodes, wanted.max_nodes), min(depth, wanted.max_depth)
    if max_draft_tokens is not None:
        nodes = min(nodes, max_draft_tokens)
    depth = min(depth, nodes)
    if depth <= 0:
        return NO_DRAFT
    if nodes == max_draft.max_nodes and depth == max_draft.max_depth:
        return max_draft
    return DraftBudget(nodes, depth)


def plan(state: State) -> Plan:
    """Plan the next step. The function reads no clock and has no state between calls."""
    step = _StepAllocation(state)
    running = sorted(state.running, key=_order)
    decoding, prefilling = _split(running)
    preempted = _secure(step, running, essential={view.id for view in (*decoding, *prefilling[:1])})
    gone = set(preempted)
    admitted = [] if preempted else _admissible(state, running)
    decoding = [view for view in decoding if view.id not in gone]
    prefilling = sorted([view for view in prefilling if view.id not in gone] + admitted, key=_order)

    if any(step.pending(view) for view in decoding):
        step.limit_prompts(state.limits.max_prompt_tokens, prefilling)
    if prefilling:
        oldest = prefilling[0]
        step.prefill(oldest, min(oldest.missing, max(1, step.tokens // 2)))
    _share_among_trees(step, [view for view in decoding if step.pending(view)])
    for view in prefilling:
        step.prefill(view, view.missing)
    _share_among_trees(step, [view for view in prefilling if step.pending(view) == view.missing])

    rows = [step.row(view) for view in sorted([*decoding, *prefilling], key=_order) if step.pending(view)]
    return Plan(tuple(view.id for view in admitted), tuple(preempted), tuple(rows))


def _order(view: SequenceView) -> tuple[int, int, int]:
    return view.priority, view.turn, view.arrival


def _split(views: Iterable[SequenceView]) -> tuple[list[SequenceView], list[SequenceView]]:
    """The sequences that decode and those that still prefill, in the order given."""
    decoding: list[SequenceView] = []
    prefilling: list[SequenceView] = []
    for view in views:
        (decoding if view.missing == 1 else prefilling).append(view)
    return decoding, prefilling


class _StepAllocation:
    """The tokens and blocks of one step while `plan` distributes them."""

    def __init__(self, state: State) -> None:
        self.tokens = state.limits.max_step_tokens
        self.blocks = state.kv.blocks_free
        self._prompt_tokens = self.tokens
        self._state = state
        self._pending: dict[SequenceId, int] = {}
        self._drafts: dict[SequenceId, DraftBudget] = {}
        self._forced: dict[SequenceId, int] = {}

    def pending(self, view: SequenceView) -> int:
        """Committed tokens of the sequence that the step has so far."""
        return self._pending.get(view.id, 0)

    def held(self, view: SequenceView) -> int:
        """Blocks that preempting the sequence frees."""
        return self._state.layout.held(view.stored_len)

    def send(self, view: SequenceView, pending: int) -> None:
        """Raise the sequence's committed tokens towards `pending`, as far as tokens and blocks allow."""
        more = self._take(view, pending - self.pending(view))
        if more:
            self._pending[view.id] = self.pending(view) + more

    def limit_prompts(self, most: int | None, prefilling: Sequence[SequenceView]) -> None:
        """Bound the prompt tokens of this step by `most`, including those that the step has already."""
        if most is not None:
            self._prompt_tokens = max(0, most - sum(self.pending(view) for view in prefilling))

    def prefill(self, view: SequenceView, pending: int) -> None:
        """Do the same as `send`, within the bound on prompt tokens."""
        before = self.pending(view)
        self.send(view, min(pending, before + self._prompt_tokens))
        self._prompt_tokens -= self.pending(view) - before

    def largest_draft(self, view: SequenceView) -> DraftBudget:
        """The largest tree that the sequence can use."""
        return clip_draft(view.draft, self._state.max_draft, view.max_draft_tokens, self._remaining(view))

    def forced(self, view: SequenceView) -> int:
        """The forced tokens that the sequence can use."""
        most = view.forced if view.max_draft_tokens is None else min(view.forced, view.max_draft_tokens)
        return max(0, min(most, self._remaining(view) - 1))

    def add_tree(self, view: SequenceView, largest: DraftBudget, nodes: int) -> None:
        """Give the sequence a tree of up to `nodes` nodes, as far as tokens and blocks allow."""
        nodes = self._take(view, nodes) if nodes > 0 else 0
        self._forced[view.id] = min(nodes, self.forced(view))
        if drafted := min(nodes, largest.max_nodes):
            self._drafts[view.id] = DraftBudget(drafted, min(drafted, largest.max_depth))

    def row(self, view: SequenceView) -> PlannedRow:
        """The sequence's part in the step."""
        pending = self.pending(view)
        draft, forced = self._drafts.get(view.id, NO_DRAFT), self._forced.get(view.id, 0)
        return PlannedRow(view.id, pending, pending == view.missing, draft, forced)

    def _remaining(self, view: SequenceView) -> int:
        """Tokens that the answer may still have in the request and in the context."""
        return min(view.remaining, self._state.max_context_len - view.length + 1)

    def _take(self, view: SequenceView, wanted: int) -> int:
        """Take up to `wanted` tokens and the blocks that they need. Returns the number taken."""
        layout = self._state.layout
        end = view.stored_len + self.pending(view)
        taken = max(0, min(wanted, self.tokens, layout.max_length(end, self.blocks) - end))
        self.tokens -= taken
        self.blocks -= layout.held(view.stored_len, end + taken) - layout.held(view.stored_len, end)
        return taken


def _secure(step: _StepAllocation, running: list[SequenceView], essential: set[SequenceId]) -> list[SequenceId]:
    """Give each essential sequence its first token, preempting the latest for older ones. Others keep their blocks."""
    preempted: list[SequenceId] = []
    remaining = list(running)
    index = 0
    while index < len(remaining):
        view = remaining[index]
        index += 1
        if view.id not in essential:
            continue
        step.send(view, 1)
        if step.pending(view) or not any(step.held(other) for other in remaining[index:]):
            continue
        while not step.pending(view) and len(remaining) > index:
            victim = remaining.pop()
            preempted.append(victim.id)
            step.blocks += step.held(victim)
            step.send(view, 1)
    return preempted


def _admissible(state: State, running: Sequence[SequenceView]) -> list[SequenceView]:
    """The waiting sequences that may start now, strictly by arrival, so that a small one never overtakes a large one.

    Each needs free blocks for its whole length (without shared blocks) and one more, in addition to the blocks that the
    sequences before it still need. The step's tokens bound the number of running sequences too, so that each can have
    one token in every step. The sources that an encoder reads for sequences that start together take at most the tokens
    of a step, or `max_prompt_tokens` while others run; a single longer one is read alone.
    """
    layout = state.layout
    step_tokens = state.limits.max_step_tokens
    most = min(state.limits.max_sequences, state.limits.max_step_tokens)
    free = state.kv.blocks_free
    free -= sum(max(0, layout.peak(view.length + 1, step_tokens) - layout.held(view.stored_len)) for view in running)
    admitted: list[SequenceView] = []
    prompt_tokens = state.limits.max_prompt_tokens if running else None
    source_tokens = step_tokens if prompt_tokens is None else prompt_tokens
    for view in sorted(state.waiting, key=_order):
        alone = not running and not admitted
        if admitted and view.source_len > source_tokens:
            break
        source_tokens = max(0, source_tokens - view.source_len)
        shared = layout.held(view.shared_len // layout.block_size * layout.block_size)
        need = max(0, layout.peak(view.length, step_tokens) - shared) + (0 if alone else layout.tables)
        need += layout.held(view.source_len)
        if need > free or len(running) + len(admitted) >= most:
            break
        free -= need
        admitted.append(view)
    return admitted


def _share_among_trees(step: _StepAllocation, views: Sequence[SequenceView]) -> None:
    """Share the tokens left evenly among trees. Tokens that a small tree does not use go to the larger trees."""
    largest = {view.id: step.largest_draft(view) for view in views}
    drafts = [(max(largest[view.id].max_nodes, step.forced(view)), view) for view in views]
    drafts.sort(key=lambda draft: (draft[0], draft[1].arrival))
    for index, (nodes, view) in enumerate(drafts):
        step.add_tree(view, largest[view.id], min(nodes, step.tokens // (len(drafts) - index)))
