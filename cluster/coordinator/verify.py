"""Verify: build the rows of a plan and let the target compute them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.quarantine import Quarantine
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import NO_DRAFT, DraftBudget, Proposal
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.scheduling.state import Plan, PlannedRow
from cluster.core.sequence import Sequence
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from cluster.core.verification import StepResult, VerifyRow
from cluster.speculation.observation import RoundDrafts


class Verifier:
    """Sends rows to the target."""

    def __init__(self, table: RequestTable, target: TargetClient, quarantine: Quarantine) -> None:
        self._table = table
        self._target = target
        self._quarantine = quarantine

    def rows(self, plan: Plan, drafts: RoundDrafts) -> tuple[VerifyRow, ...]:
        """Return the rows to send, with their drafts. No state changes."""
        return self._quarantine.select(
            build_rows(
                plan,
                self._table.running,
                drafts.proposals,
                drafts.next_budgets,
                wants_following=drafts.wants_following,
            )
        )

    async def verify(self, rows: tuple[VerifyRow, ...]) -> StepResult:
        """Compute the rows in one forward pass. Raises `TargetUnavailable`."""
        running = self._table.running
        for row in rows:
            running[row.sequence_id].mark_sent()
        try:
            return await self._target.step(rows)
        except TargetUnavailable:
            self._quarantine.record_loss({row.sequence_id: row for row in rows})
            raise


def build_rows(
    plan: Plan,
    running: Mapping[SequenceId, LiveSequence],
    proposals: Mapping[SequenceId, Proposal],
    next_budgets: Mapping[SequenceId, DraftBudget] = MappingProxyType({}),
    *,
    wants_following: bool = False,
) -> tuple[VerifyRow, ...]:
    """The planned rows of the sequences that still run, each with its draft and its next budget if it has them.

    `wants_following`: drafters elsewhere want to know what the grammars of sequences allow after the step.
    """
    rows: list[VerifyRow] = []
    for planned in plan.rows:
        live = running.get(planned.sequence_id)
        if live is None:
            continue
        sequence = live.sequence
        first, end = sequence.stored_len, sequence.stored_len + planned.pending
        draft = _trim(proposals.get(sequence.id), planned)
        if planned.forced:
            draft = with_forced(draft, sequence, planned)
        row = VerifyRow(
            sequence_id=sequence.id,
            base_len=end,
            pending=tuple(sequence.tokens[first:end]),
            tree=EMPTY_TREE if draft is None else draft.tree,
            decide=planned.decide,
            start=sequence.start if first == 0 else None,
            distributions=() if draft is None else draft.distributions,
            next_budget=next_budgets.get(sequence.id, NO_DRAFT),
            origins=() if draft is None else draft.origins,
            wants_following=wants_following and planned.decide and _follows_grammar(live),
        )
        rows.append(row)
    return tuple(rows)


def _follows_grammar(live: LiveSequence) -> bool:
    """Whether the sequence has a grammar and may have drafts."""
    return live.sequence.request.sampling.grammar is not None and live.max_draft_tokens != 0


def _trim(proposal: Proposal | None, planned: PlannedRow) -> Proposal | None:
    """Return the part of the draft that the plan has tokens for. An earlier plan may have requested a larger tree."""
    if proposal is None or not planned.decide:
        return None
    return proposal.subset(proposal.tree.within(planned.draft.max_nodes, planned.draft.max_depth))


def with_forced(draft: Proposal | None, sequence: Sequence, planned: PlannedRow) -> Proposal:
    """Return a draft that begins with the tokens that the grammar forces and goes on as the given draft does.

    A draft whose nodes have distributions, or that must be verified whole, is left out.
    """
    forced = sequence.forced[: planned.forced]
    tokens, parents = list(forced), list(range(-1, len(forced) - 1))
    origins = [DraftOrigin.FORCED] * len(forced)
    if draft is not None and draft.is_prunable and not draft.distributions:
        most = max(planned.draft.max_nodes, len(forced))
        added = _extend(tokens, parents, draft.tree, most, planned.draft.max_depth)
        origins += [draft.node_origins[node] for node in added]
    tree = TokenTree(tuple(tokens), tuple(parents))
    return Proposal(sequence.id, len(sequence), tree, origins=tuple(origins))


def _extend(tokens: list[int], parents: list[int], tree: TokenTree, most: int, max_depth: int) -> list[int]:
    """Add the nodes of a tree below the end of a chain, as far as the tree has the chain. Return their numbers."""
    chain = len(tokens)
    node = ROOT
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            return []
        node = child
    copies, depths = {node: chain - 1}, {node: chain}
    added: list[int] = []
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent in copies and len(tokens) < most and depths[parent] < max_depth:
            copies[index], depths[index] = len(tokens), depths[parent] + 1
            tokens.append(token)
            parents.append(copies[parent])
            added.append(index)
    return added
