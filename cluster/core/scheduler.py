"""What the next step holds: a pure function of frozen values.

Sequences are served by arrival. Every step gives each decoding sequence its one token first; the oldest sequence
still filling its prompt is sure of half of what is left; trees share the rest evenly, and prompt chunks fill what
the trees leave. While others decode, prompts together take `max_prompt_tokens` of a step at most, so that its length,
which is the time between the others' tokens, does not hang on who else came (chunked prefill, as in Sarathi-Serve,
Agrawal et al. 2024). Memory is given on demand: where it runs out, the latest arrival gives its blocks up and is
replayed later, in its old place, so that the oldest can always finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.core.config import SchedulerSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the scheduler may know of a sequence; lengths in tokens."""

    id: SequenceId
    arrival: int
    length: int
    """Committed tokens, prompt and answer."""
    stored_len: int
    """Leading ones whose KV the target holds; less than `length`."""
    remaining: int
    """Tokens the answer may still have."""
    shared_len: int = 0
    """Leading tokens, while it waits, whose blocks it will share with a sequence that holds them already."""
    max_nodes: int | None = None
    """Most nodes of its tree, where it is to have fewer than others."""
    max_depth: int | None = None
    """And how deep it may be."""

    @property
    def missing(self) -> int:
        """Committed tokens to send: 1 while decoding, more while (re)filling."""
        return self.length - self.stored_len


@dataclass(frozen=True, slots=True)
class State:
    """Everything a plan depends on."""

    waiting: tuple[SequenceView, ...]
    running: tuple[SequenceView, ...]
    kv: KvOccupancy
    """As the target last reported it."""
    layout: KvLayout
    max_context_len: int
    limits: SchedulerSection
    draft: DraftBudget
    """The most that any tree may have."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One running sequence's part in the step."""

    sequence_id: SequenceId
    pending: int
    """How many of its missing tokens go, from the first."""
    decide: bool
    """Whether they reach its end, so that the target decides what follows."""
    draft: DraftBudget
    """How large a tree may hang below them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now: preempt, admit, then step over `rows` (in order of arrival)."""

    admit: tuple[SequenceId, ...] = ()
    preempt: tuple[SequenceId, ...] = ()
    rows: tuple[PlannedRow, ...] = ()


def check_fits(prompt_len: int, max_tokens: int, max_context_len: int, pool_tokens: int) -> None:
    """Refuse what could never finish, even alone. Raises `InvalidRequest` naming the bound."""
    if prompt_len < 1:
        raise InvalidRequest("prompt", f"{prompt_len} tokens", "at least one token")
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", max_tokens, "at least 1")
    for bound, name in ((max_context_len, "the model's context"), (pool_tokens, "the target's KV pool")):
        if prompt_len >= bound:
            raise InvalidRequest("prompt", f"{prompt_len} tokens", f"shorter than {name} of {bound} tokens")
        if prompt_len + max_tokens > bound:
            left = f"at most {bound - prompt_len}: {name} holds {bound} tokens, the prompt has {prompt_len}"
            raise InvalidRequest("max_tokens", max_tokens, left)


def plan(state: State) -> Plan:
    """Decide the next step. Uses no clock and keeps nothing between calls."""
    sheet = _Sheet(state)
    running = sorted(state.running, key=_arrival)
    decoding, filling = _split(running)
    preempted = _secure(sheet, running, essential={view.id for view in (*decoding, *filling[:1])})
    gone = set(preempted)
    admitted = [] if preempted else _admissible(state, running)
    decoding = [view for view in decoding if view.id not in gone]
    filling = sorted([view for view in filling if view.id not in gone] + admitted, key=_arrival)

    if any(sheet.pending(view) for view in decoding):
        sheet.bound_prompts(state.limits.max_prompt_tokens, filling)
    if filling:
        oldest = filling[0]
        sheet.fill(oldest, min(oldest.missing, max(1, sheet.tokens // 2)))
    _share_among_trees(sheet, [view for view in decoding if sheet.pending(view)])
    for view in filling:
        sheet.fill(view, view.missing)
    _share_among_trees(sheet, [view for view in filling if sheet.pending(view) == view.missing])

    rows = [sheet.row(view) for view in sorted([*decoding, *filling], key=_arrival) if sheet.pending(view)]
    return Plan(tuple(view.id for view in admitted), tuple(preempted), tuple(rows))


def _arrival(view: SequenceView) -> int:
    return view.arrival


def _split(views: Iterable[SequenceView]) -> tuple[list[SequenceView], list[SequenceView]]:
    """Those that decode and those that still fill, in the order given."""
    decoding: list[SequenceView] = []
    filling: list[SequenceView] = []
    for view in views:
        (decoding if view.missing == 1 else filling).append(view)
    return decoding, filling


class _Sheet:
    """Tokens and blocks while they are being given out; lives for one `plan`."""

    def __init__(self, state: State) -> None:
        self.tokens = state.limits.max_step_tokens
        self.blocks = state.kv.blocks_free
        self._prompt_tokens = self.tokens
        self._state = state
        self._pending: dict[SequenceId, int] = {}
        self._nodes: dict[SequenceId, int] = {}

    def pending(self, view: SequenceView) -> int:
        """Committed tokens granted to the sequence so far."""
        return self._pending.get(view.id, 0)

    def held(self, view: SequenceView) -> int:
        """Blocks of the sequence that preempting it gives back."""
        return self._state.layout.held(view.stored_len)

    def send(self, view: SequenceView, pending: int) -> None:
        """Raise the sequence's committed tokens towards `pending`, as far as tokens and blocks go."""
        more = self._grant(view, pending - self.pending(view))
        if more:
            self._pending[view.id] = self.pending(view) + more

    def bound_prompts(self, most: int | None, filling: Sequence[SequenceView]) -> None:
        """Let prompts have `most` tokens of this step, those granted already among them."""
        if most is not None:
            self._prompt_tokens = max(0, most - sum(self.pending(view) for view in filling))

    def fill(self, view: SequenceView, pending: int) -> None:
        """`send`, out of what prompts may have."""
        before = self.pending(view)
        self.send(view, min(pending, before + self._prompt_tokens))
        self._prompt_tokens -= self.pending(view) - before

    def grow(self, view: SequenceView, nodes: int) -> None:
        """Give the sequence a tree of up to `nodes` nodes, as far as tokens and blocks go."""
        self._nodes[view.id] = self._grant(view, nodes)

    def longest_tree(self, view: SequenceView) -> DraftBudget:
        """The tree that would be of use: nothing beyond the answer's last token but one, or the context."""
        most = self._state.draft
        nodes = most.max_nodes if view.max_nodes is None else min(view.max_nodes, most.max_nodes)
        depth = most.max_depth if view.max_depth is None else min(view.max_depth, most.max_depth)
        depth = min(depth, view.remaining - 1, self._state.max_context_len - view.length)
        return DraftBudget(nodes, depth) if nodes > 0 and depth > 0 else NO_DRAFT

    def row(self, view: SequenceView) -> PlannedRow:
        """What the sequence was granted."""
        nodes = self._nodes.get(view.id, 0)
        draft = DraftBudget(nodes, min(nodes, self.longest_tree(view).max_depth))
        return PlannedRow(view.id, self.pending(view), self.pending(view) == view.missing, draft)

    def _grant(self, view: SequenceView, wanted: int) -> int:
        """Take up to `wanted` tokens and the blocks they need; how many were had."""
        layout = self._state.layout
        end = view.stored_len + self.pending(view) + self._nodes.get(view.id, 0)
        granted = max(0, min(wanted, self.tokens, layout.room(end, self.blocks) - end))
        self.tokens -= granted
        self.blocks -= layout.held(view.stored_len, end + granted) - layout.held(view.stored_len, end)
        return granted


def _secure(sheet: _Sheet, running: list[SequenceView], essential: set[SequenceId]) -> list[SequenceId]:
    """Give each essential sequence its first token; the latest arrivals are preempted for the blocks of older ones.

    A sequence that no preemption could help keeps what it holds and is left out of this step.
    """
    preempted: list[SequenceId] = []
    remaining = list(running)
    index = 0
    while index < len(remaining):
        view = remaining[index]
        index += 1
        if view.id not in essential:
            continue
        sheet.send(view, 1)
        younger = remaining[index:]
        if sheet.pending(view) or not any(sheet.held(other) for other in younger):
            continue
        while not sheet.pending(view) and len(remaining) > index:
            victim = remaining.pop()
            preempted.append(victim.id)
            sheet.blocks += sheet.held(victim)
            sheet.send(view, 1)
    return preempted


def _admissible(state: State, running: Sequence[SequenceView]) -> list[SequenceView]:
    """The waiting sequences that may start now: strictly by arrival, so that none is overtaken for its size.

    Each must find blocks for its whole length (less what it shares) and one more, beside what those before it have
    yet to store. The count is bounded by the step's tokens too: so each running sequence can have one in every step.
    """
    layout = state.layout
    step_tokens = state.limits.max_step_tokens
    most = min(state.limits.max_sequences, state.limits.max_step_tokens)
    room = state.kv.blocks_free
    room -= sum(max(0, layout.peak(view.length + 1, step_tokens) - layout.held(view.stored_len)) for view in running)
    admitted: list[SequenceView] = []
    for view in sorted(state.waiting, key=_arrival):
        alone = not running and not admitted
        shared = layout.held(view.shared_len // layout.block_size * layout.block_size)
        need = max(0, layout.peak(view.length, step_tokens) - shared) + (0 if alone else layout.tables)
        if need > room or len(running) + len(admitted) >= most:
            break
        room -= need
        admitted.append(view)
    return admitted


def _share_among_trees(sheet: _Sheet, views: Sequence[SequenceView]) -> None:
    """Give trees even shares of the tokens left; what the modest leave over goes to the others."""
    wanting = sorted(((sheet.longest_tree(view).max_nodes, view.arrival, view) for view in views), key=lambda w: w[:2])
    for index, (nodes, _, view) in enumerate(wanting):
        sheet.grow(view, min(nodes, sheet.tokens // (len(wanting) - index)))
