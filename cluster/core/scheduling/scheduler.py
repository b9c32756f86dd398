"""The scheduler: which rows the next step has, as a pure function of frozen values.

Sequences are served by priority, then by their clients' turns, then by arrival (`FairQueue`): "older" means this order.
Every step first gives each decoding sequence one token. Half of the tokens left are reserved for the oldest sequence
that still prefills and that the target is ready for. Draft trees share the others evenly. Prompt chunks use the tokens
that the trees leave. While other sequences decode, all prompts together take at most `max_prompt_tokens` of a step, so
that a new request does not lengthen the time between the tokens of the others (chunked prefill, as in Sarathi-Serve,
Agrawal et al. 2024). Blocks are allocated on demand. When they run out, the latest is preempted, so that the oldest
sequence can always finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.scheduling.allocation import StepAllocation
from cluster.core.scheduling.state import Plan, SequenceView, State


def plan(state: State) -> Plan:
    """Plan the next step. The function reads no clock and has no state between calls."""
    step = StepAllocation(state)
    running = sorted(state.running, key=_order)
    decoding, prefilling = _split(running)
    prefilling.sort(key=_prompt_order)
    preempted = _secure(step, running, essential={view.id for view in (*decoding, *prefilling[:1])})
    gone = set(preempted)
    admitted = [] if preempted else _admissible(state, running)
    decoding = [view for view in decoding if view.id not in gone]
    prefilling = sorted([view for view in prefilling if view.id not in gone] + admitted, key=_prompt_order)

    if any(step.pending(view) for view in decoding):
        step.limit_prompts(state.limits.max_prompt_tokens, prefilling)
    if prefilling:
        oldest = prefilling[0]
        step.prefill(oldest, min(oldest.missing, max(1, step.tokens // 2)))
    _share_among_trees(step, [view for view in decoding if step.pending(view)])
    for view in prefilling:
        step.prefill(view, view.missing)
    _share_among_trees(step, [view for view in prefilling if step.pending(view) == view.missing])

    views = sorted([*decoding, *prefilling], key=_order) if prefilling else decoding
    rows = [step.row(view) for view in views if step.pending(view)]
    return Plan(tuple(view.id for view in admitted), tuple(preempted), tuple(rows))


def _order(view: SequenceView) -> tuple[int, int, int]:
    return view.priority, view.turn, view.arrival


def _prompt_order(view: SequenceView) -> tuple[bool, int, int, int]:
    return view.goes_last, *_order(view)


def _split(views: Iterable[SequenceView]) -> tuple[list[SequenceView], list[SequenceView]]:
    """The sequences that decode and those that still prefill, in the order given."""
    decoding: list[SequenceView] = []
    prefilling: list[SequenceView] = []
    for view in views:
        (decoding if view.stored_len + 1 == view.length else prefilling).append(view)
    return decoding, prefilling


def _secure(step: StepAllocation, running: list[SequenceView], essential: set[SequenceId]) -> list[SequenceId]:
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
    one token in every step. The sources that an encoder must still read, those of running sequences included, take at
    most the tokens of a step, or `max_prompt_tokens` while others run; a single longer one is read alone.
    """
    if not state.waiting:
        return []
    layout = state.layout
    step_tokens = state.limits.max_step_tokens
    most = min(state.limits.max_sequences, state.limits.max_step_tokens)
    free = state.kv.blocks_free
    free -= sum(max(0, layout.peak(view.length + 1, step_tokens) - layout.held(view.stored_len)) for view in running)
    unread = [view.source_len for view in running if view.source_len]
    free -= sum(map(layout.held, unread))
    admitted: list[SequenceView] = []
    prompt_tokens = state.limits.max_prompt_tokens if running else None
    source_tokens = max(0, (step_tokens if prompt_tokens is None else prompt_tokens) - sum(unread))
    for view in sorted(state.waiting, key=_order):
        alone = not running and not admitted
        if (admitted or unread) and view.source_len > source_tokens:
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


def _share_among_trees(step: StepAllocation, views: Sequence[SequenceView]) -> None:
    """Share the tokens left evenly among trees. Tokens that a small tree does not use go to the larger trees."""
    drafts: list[tuple[int, DraftBudget, SequenceView]] = []
    for view in views:
        largest = step.largest_draft(view)
        if nodes := max(largest.max_nodes, step.forced(view) if view.forced else 0):
            drafts.append((nodes, largest, view))
    drafts.sort(key=lambda draft: (draft[0], draft[2].arrival))
    for index, (nodes, largest, view) in enumerate(drafts):
        step.add_tree(view, largest, min(nodes, step.tokens // (len(drafts) - index)))
