"""The drafter on the target is shown what the steps show of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.drafting import EVIDENCE_ONLY, DraftBudget, DraftRow, Evidence, HiddenStates, Proposal
from cluster.core.evidence_store import MAX_BYTES
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import VerifyRow
from workers.verify.colocated import ColocatedDrafter, VerifiedRow

NAME = SequenceId("s")
CHUNK = 512
WIDTH = MAX_BYTES // (8 * CHUNK)
"""Values per position with which a chunk of a prompt takes a quarter of what is kept for drafters elsewhere."""


class Recorder:
    """A drafting method that keeps its rows and drafts nothing."""

    def __init__(self) -> None:
        self.rows: list[DraftRow] = []

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self.rows += rows
        return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Nothing is kept."""


def shown(chunks: int, width: int = WIDTH) -> list[DraftRow]:
    """The rows that the method gets while the target computes a prompt of so many chunks and decides a token."""
    method = Recorder()
    drafter, tokens = ColocatedDrafter(method), [1] * CHUNK * chunks
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        decides = end == len(tokens)
        budget = DraftBudget(2, 2) if decides else EVIDENCE_ONLY
        row = VerifyRow(NAME, end, tuple(tokens[end - CHUNK : end]), decide=decides, next_budget=budget)
        hidden = HiddenStates(end - CHUNK, width, bytes(2 * width * CHUNK))
        last = (2,) if decides else ()
        drafter.draft(
            [
                VerifiedRow(
                    row,
                    SequenceStart(len(tokens), SamplingParameters()),
                    tokens[:end],
                    last,
                    Evidence(end, hidden=hidden),
                )
            ]
        )
    return method.rows


@pytest.mark.parametrize("width", [WIDTH, 3 * WIDTH, 6 * WIDTH], ids=str)
def test_a_drafter_on_the_target_is_shown_all_hidden_states_of_a_long_prompt(width: int) -> None:
    rows = shown(9, width)
    parts = [evidence.hidden for row in rows for evidence in row.evidence if evidence.hidden is not None]
    assert [position for part in parts for position in range(part.first, part.end)] == list(range(9 * CHUNK))
    assert sum(len(row.new_tokens) for row in rows) == 9 * CHUNK + 1
    assert [row.start is not None for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row.budget.max_nodes for row in rows] == [0] * (len(rows) - 1) + [2]


def test_a_drafter_on_the_target_is_called_first_when_a_short_prompt_has_been_computed() -> None:
    assert [row.base_len for row in shown(chunks=2)] == [2 * CHUNK + 1]
