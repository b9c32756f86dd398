"""What recurrent layers do in a step: from which slot each token's state comes, and in which slot it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster.core.tree import ROOT, TokenTree
from workers.kv.state_slots import ZERO
from workers.kv.states import SequenceStates
from workers.transfer import StepArray, joined, split_together, to_device_together, words_together

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
    """The source and the target of each token, on the host; empty in a CUDA graph, which replays other steps."""
    is_padded: bool = False
    """Whether there may be tokens behind the last row, which no row computes."""

    def output(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Memory for what the rows compute, of the type and on the device of `like`: zeros if rows may leave a part."""
        make = torch.zeros if self.is_padded else torch.empty
        return make(tuple(shape), dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceColumns:
    """A `RecurrencePlan` on the host."""

    arrays: tuple[StepArray, ...]
    """int32 columns: where each row begins `[rows + 1]`, then `source`, `target` and `parents` `[tokens]`."""
    moves: tuple[tuple[int, int], ...]

    def on(self, device: torch.device) -> RecurrencePlan:
        """The plan on a device, copied in one piece."""
        row_starts, source, target, parents = to_device_together(self.arrays, device)
        return RecurrencePlan(row_starts, source, target, parents, self.moves)

    def padded(self, rows: int, tokens: int) -> list[StepArray]:
        """The columns of so many rows and tokens. Padding rows have no tokens. Padding tokens are of no row: each
        continues the zero state, and stores none."""
        widths = (rows + 1, len(self.moves)), (tokens, ZERO), (tokens, NONE), (tokens, NONE)
        columns = [np.full(width, padding, dtype=np.int32) for width, padding in widths]
        for column, own in zip(columns, self.arrays, strict=True):
            column[: len(own)] = own
        return [*columns]


class RecurrenceBuffers:
    """The plan of a CUDA graph, at fixed addresses. `fill` copies the columns of a step in."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        """For steps of up to so many rows and tokens in all. They are read only after they are filled."""
        self._rows, self._tokens = rows, tokens
        arrays = recurrence_columns(()).padded(rows, tokens)
        self._numbers = torch.zeros(words_together(arrays), dtype=torch.int64, device=device)
        row_starts, source, target, parents = split_together(self._numbers, arrays)
        self.plan = RecurrencePlan(row_starts, source, target, parents, moves=(), is_padded=True)

    def fill(self, columns: RecurrenceColumns) -> None:
        """Copy a step that fits into the buffers, in one piece. The host does not wait for the copy."""
        # torch does not reuse pinned memory before the copy has finished.
        self._numbers.copy_(joined(columns.padded(self._rows, self._tokens), self._numbers.device), non_blocking=True)


def plan_recurrence(rows: Sequence[StateRow], device: torch.device) -> RecurrencePlan:
    """The plan of a step whose rows hold the slots of their states. Raises `ValueError` for a row without tokens."""
    return recurrence_columns(rows).on(device)


def recurrence_columns(rows: Sequence[StateRow]) -> RecurrenceColumns:
    """The columns of a step whose rows hold the slots of their states. Raises `ValueError` for a row without tokens."""
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
    lists = starts, [source for source, _ in moves], [target for _, target in moves], parents
    return RecurrenceColumns(tuple(np.array(one, dtype=np.int32) for one in lists), tuple(moves))
