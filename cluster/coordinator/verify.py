"""A plan made into the step's rows, and a verdict held against its row."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.coordinator.running import Lane
from cluster.core.ids import SequenceId
from cluster.core.scheduler import Plan, PlannedRow
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import Verdict, VerifyRow


def build_rows(
    plan: Plan, running: Mapping[SequenceId, Lane], trees: Mapping[SequenceId, TokenTree]
) -> tuple[VerifyRow, ...]:
    """The planned rows of those sequences that are still there, each with its tree if it got one."""
    rows: list[VerifyRow] = []
    for planned in plan.rows:
        lane = running.get(planned.sequence_id)
        if lane is None:
            continue
        lane.touch()
        sequence = lane.sequence
        first, end = sequence.stored_len, sequence.stored_len + planned.pending
        row = VerifyRow(
            sequence_id=sequence.id,
            base_len=end,
            pending=tuple(sequence.tokens[first:end]),
            tree=_fitting(trees.get(sequence.id), planned),
            decide=planned.decide,
            start=sequence.start if first == 0 else None,
        )
        rows.append(row)
    return tuple(rows)


def _fitting(tree: TokenTree | None, planned: PlannedRow) -> TokenTree:
    """What of the tree the plan has room for: it may have been asked for under another one."""
    if tree is None or not planned.decide:
        return EMPTY_TREE
    return tree.truncated(planned.draft.max_nodes, planned.draft.max_depth)


def is_sound(row: VerifyRow, verdict: Verdict | None) -> bool:
    """Whether the verdict answers the row: of its length, and with as many tokens as its tree allows."""
    if verdict is None or verdict.base_len != row.base_len:
        return False
    if verdict.fault is not None:
        return True
    fewest, most = (1, 1 + row.tree.depth()) if row.decide else (0, 0)
    return fewest <= len(verdict.tokens) <= most
