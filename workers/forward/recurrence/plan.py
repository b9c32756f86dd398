"""What recurrent layers do in a step: from which slot each token's state comes, and in which slot it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cluster.core.tree import ROOT, TokenTree
from workers.kv.states import SequenceStates
from workers.transfer import tensor_on

NONE = -1
"""In place of a slot: the state of the token before, or a state that is not stored."""


@dataclass(frozen=True, slots=True, eq=False)
class StateRow:
    """One row of a step: its committed tokens, the tree below the last of them, and where its states are kept."""

    fresh: int
    """Committed tokens, at least one."""
    tree: TokenTree
    states: SequenceStates
    kept: Mapping[int, int] = field(default_factory=dict)
    """The slots of the states inside its committed tokens that are kept, by the number of tokens before each."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrencePlan:
    """The tokens of all rows of a step, one row after another, and the slots of their states.

    No slot is both the source of a row's first token and a target, and none is the target of two tokens.
    """

    row_starts: torch.Tensor
    """int32 `[rows + 1]`: row `r` has the tokens from `row_starts[r]` to `row_starts[r + 1] - 1`."""
    source: torch.Tensor
    """int32 `[tokens]`: the slot whose state the token continues, or −1: the state after the token before it. The first
    token of a row has a slot."""
    target: torch.Tensor
    """int32 `[tokens]`: the slot where the state after the token is stored, or −1."""
    parents: torch.Tensor
    """int32 `[tokens]`: the token of the step that comes before the token, or −1 for the first of a row."""
    moves: tuple[tuple[int, int], ...]
    """The source and the target of each token, on the host."""


def plan_recurrence(rows: Sequence[StateRow], device: torch.device) -> RecurrencePlan:
    """The plan of a step whose rows hold the slots of their states. Raises `ValueError` for a row without tokens."""
    starts, moves, parents = [0], list[tuple[int, int]](), list[int]()
    for row in rows:
        if row.fresh < 1:
            raise ValueError("a row without committed tokens is refused: its recurrent states would have no source")
        kept, fresh = row.kept, row.states.fresh
        moves.append((row.states.committed, kept.get(1, NONE)))
        moves.extend((NONE, kept.get(length, NONE)) for length in range(2, row.fresh + 1))
        moves[-1] = (moves[-1][0], fresh[0])
        parents += [NONE, *range(starts[-1], starts[-1] + row.fresh - 1)]
        for node, parent in enumerate(row.tree.parents):
            parents.append(len(moves) - node + parent)
            moves.append((NONE if parent == node - 1 else fresh[parent - ROOT], fresh[node + 1]))
        starts.append(len(moves))
    source, target = zip(*moves, strict=True)
    lists = starts, source, target, parents
    row_starts, sources, targets, before = (tensor_on(device, one, torch.int32) for one in lists)
    return RecurrencePlan(row_starts, sources, targets, before, tuple(moves))
