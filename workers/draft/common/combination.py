"""Several drafting methods that share one draft tree.

Every method proposes for the same rows. The union of their trees is one trie. The probability of a node is learned from
what the target decides, separately for each set of methods that propose it and for each bin of the probability that
they give it. The most probable nodes are the proposal. A method that costs more time than its nodes save is suspended
for a while, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core.drafting import DraftRow, Proposal, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftingTarget, DraftMethod, DraftsByTarget, ReadsSourceStates, SourceStates
from workers.draft.common.idle_work import IdleWork
from workers.draft.common.method_value import MethodValue, MissedRows, RoundRate
from workers.draft.common.sessions import MOST_SESSIONS
from workers.draft.common.union_tree import TakenRates, UnionNode, add_tree, choose_nodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Proposed:
    """The union that the last proposal of a sequence was chosen from."""

    base_len: int
    root: UnionNode


@dataclass(frozen=True, slots=True)
class _Learned:
    """What the target has decided after one proposal."""

    tokens: int
    """Number of committed tokens."""
    accepted: tuple[frozenset[int], ...]
    """The methods that had proposed each accepted token, by number."""

    def gained(self, method: int) -> int:
        """The accepted tokens that only this method brought: from the first that no other one had proposed."""
        alone = (depth for depth, methods in enumerate(self.accepted) if methods == {method})
        return len(self.accepted) - next(alone, len(self.accepted))


@dataclass(slots=True)
class _Member:
    """One method of a combination."""

    method: DraftMethod
    reads_hidden: bool
    can_pause: bool
    """Whether it may be suspended: not if it computes on all ranks of the target, which must agree."""
    value: MethodValue = field(default_factory=MethodValue)
    missed: MissedRows = field(default_factory=MissedRows)


class Combination:
    """Proposes the most probable nodes of all methods' trees. It is a `DraftMethod` with `IdleWork`."""

    def __init__(
        self,
        methods: Sequence[DraftMethod],
        reads_hidden: Sequence[bool] = (),
        clock: Callable[[], float] = time.perf_counter,
        *,
        suspends: bool = True,
    ) -> None:
        """`reads_hidden` says of each method whether it reads hidden states of the target; empty: none does.

        Without `suspends`, all methods are always asked.
        """
        self._members = tuple(
            _Member(method, reads, suspends and not isinstance(method, DraftsByTarget))
            for method, reads in zip(methods, reads_hidden or (False,) * len(methods), strict=True)
        )
        self._clock = clock
        self._rate = RoundRate()
        self._rates = TakenRates()
        self._proposed: OrderedDict[SequenceId, _Proposed] = OrderedDict()

    @property
    def reads_hidden(self) -> bool:
        """Whether a method needs hidden states of the target.

        A suspended method needs none until shortly before it is asked again.
        """
        now = self._clock()
        return any(member.reads_hidden and member.value.needs_evidence(now) for member in self._members)

    def read_sources_from(self, states: SourceStates) -> None:
        """Use the output of the target's encoder instead of reading sources, if the encoder is the same."""
        for member in self._members:
            if isinstance(member.method, ReadsSourceStates):
                member.method.read_sources_from(states)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Propose a tree for each row, in order. A method that cannot serve a sequence is left out for it."""
        self._judge([found for row in rows if (found := self._learn(row)) is not None])
        answers = [self._proposals(member, rows) for member in self._members]
        return tuple(self._merged(row, [answer[index] for answer in answers]) for index, row in enumerate(rows))

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._proposed.pop(sequence_id, None)
        for member in self._members:
            member.missed.release(sequence_ids)
            member.method.release(sequence_ids)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Compute some committed tokens of these sequences. Returns false when none are left or there is no room."""
        return any(method.catch_up(sequence_ids) for method in self._idle())

    def run_ahead(self) -> bool:
        """Do one piece of work that makes the next proposals ready sooner. Returns false when there is none."""
        return any(method.run_ahead() for method in self._idle())

    def _idle(self) -> list[IdleWork]:
        active = (member.method for member in self._members if not member.value.is_suspended)
        return [method for method in active if isinstance(method, IdleWork)]

    def _proposals(self, member: _Member, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """What one method proposes for the rows: nothing while it is suspended."""
        if member.value.is_suspended:
            member.missed.add(rows)
            return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)
        rows = member.missed.with_missed(rows)
        begun = self._clock()
        found = self._ask(member.method, rows)
        if any(row.budget.max_nodes for row in rows):
            member.value.record_call(self._clock() - begun)
        return found

    def _ask(self, method: DraftMethod, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return method.propose(rows)

    def _judge(self, learned: Sequence[_Learned]) -> None:
        """Suspend methods that cost more than they add, and resume them, by what the target has decided."""
        if not learned:
            return
        now = self._clock()
        elapsed = self._rate.observe(sum(one.tokens for one in learned), now)
        for index, member in enumerate(self._members):
            if member.can_pause:
                gained = sum(one.gained(index) for one in learned)
                member.value.judge(gained, len(learned), elapsed, self._rate, now)

    def _learn(self, row: DraftRow) -> _Learned | None:
        """Compare the last proposal of the sequence with the tokens that the target has decided since."""
        last = self._proposed.get(row.sequence_id)
        if last is None or row.known_len != last.base_len or not row.new_tokens:
            return None
        del self._proposed[row.sequence_id]
        path: list[UnionNode] = []
        node: UnionNode | None = last.root
        for token in row.new_tokens:
            if node is None or not node.children:
                break
            for drafted, child in node.children.items():
                self._rates.observe(child.key, hit=drafted == token)
            node = node.children.get(token)
            if node is not None and node.is_chosen:
                path.append(node)
        count = len(row.new_tokens)
        return _Learned(count, tuple(frozenset(one.estimates) for one in path[: count - 1]))

    def _merged(self, row: DraftRow, proposals: Sequence[Proposal]) -> Proposal:
        """The most probable nodes of all trees. A fault only if no method can serve the row."""
        faults = [proposal.fault for proposal in proposals if proposal.fault is not None]
        behind = next((fault for fault in faults if fault.code is RowFaultCode.OUT_OF_SYNC), None)
        fault = behind or (faults[0] if len(faults) == len(proposals) else None)
        if fault is not None:
            return Proposal(row.sequence_id, row.base_len, fault=fault)
        root = UnionNode()
        for method, proposal in enumerate(proposals):
            add_tree(root, method, proposal)
        self._rates.estimate(root)
        if row.budget.max_nodes:
            self._proposed[row.sequence_id] = _Proposed(row.base_len, root)
            if len(self._proposed) > MOST_SESSIONS:
                self._proposed.popitem(last=False)
        tree, probabilities, origins = choose_nodes(root, row.budget.max_nodes, row.budget.max_depth)
        return Proposal(
            row.sequence_id,
            row.base_len,
            tree,
            probabilities=probabilities,
            ready=min(len(tree), sum(proposal.ready for proposal in proposals)),
            is_prunable=all(proposal.is_prunable for proposal in proposals),
            origins=origins,
        )


class TargetCombination(Combination):
    """A combination with methods that draft by the target. It is a `DraftsByTarget`, too.

    Those methods compute on all ranks, so their exceptions are raised. Another method that raises is left out.
    """

    def _ask(self, method: DraftMethod, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        try:
            return super()._ask(method, rows)
        except Exception:
            if isinstance(method, DraftsByTarget):
                raise
            logger.exception("a drafting method failed: the next step goes without its drafts")
            method.release([row.sequence_id for row in rows])
            return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def bind(self, target: DraftingTarget) -> None:
        """Take the target's draft passes."""
        for member in self._members:
            if isinstance(member.method, DraftsByTarget):
                member.method.bind(target)


def combined(
    methods: Sequence[DraftMethod], reads_hidden: Sequence[bool] = (), *, suspends: bool = True
) -> DraftMethod:
    """One method out of several, or the only one. `reads_hidden` and `suspends`: see `Combination`."""
    if len(methods) == 1:
        return methods[0]
    has_target = any(isinstance(method, DraftsByTarget) for method in methods)
    kind = TargetCombination if has_target else Combination
    return kind(methods, reads_hidden, suspends=suspends)
