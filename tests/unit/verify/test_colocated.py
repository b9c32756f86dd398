"""The drafter on the target is shown what the steps show of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.drafting import EVIDENCE_ONLY, DraftBudget, DraftRow, Evidence, HiddenStates, Proposal
from cluster.core.evidence_store import MAX_BYTES
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
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


class Fragile(Recorder):
    """A method that drafts one token, and raises up to `errors` times for sequences whose last token is in `bad`."""

    def __init__(self, bad: Sequence[int], errors: int = 100) -> None:
        super().__init__()
        self.bad = bad
        self.errors = errors

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        super().propose(rows)
        if self.errors and any(row.new_tokens[-1] in self.bad for row in rows):
            self.errors -= 1
            raise ZeroDivisionError("a bug in the method")
        return tuple(Proposal(row.sequence_id, row.base_len, TokenTree.chain([1])) for row in rows)


def drafted(method: Fragile, lasts: Sequence[int], steps: int) -> list[set[str]]:
    """The sequences with a draft after each step; `lasts` are the last tokens of each, by name."""
    drafter, found = ColocatedDrafter(method), []
    for length in range(4, 4 + steps):
        verified = [
            VerifiedRow(
                VerifyRow(SequenceId(str(last)), length, (last,), next_budget=DraftBudget(2, 2)),
                SequenceStart(2, SamplingParameters()),
                [last] * length,
                (last,),
                None,
            )
            for last in lasts
        ]
        found.append(set(map(str, drafter.draft(verified))))
    return found


def test_a_sequence_that_makes_the_method_raise_twice_gets_no_drafts_and_others_have_all_of_theirs() -> None:
    method = Fragile(bad=[3])
    assert drafted(method, [1, 2, 3], steps=4) == [{"1", "2"}] * 4
    sent = [row for row in method.rows if row.sequence_id == "3"]
    assert len(sent) == 4 and all(row.start is not None for row in sent)  # twice with the others, and twice alone
    last = method.rows[-2:]
    assert [(row.sequence_id, len(row.new_tokens), row.start) for row in last] == [("1", 1, None), ("2", 1, None)]


def test_after_an_error_of_a_step_all_sequences_have_drafts_again() -> None:
    assert drafted(Fragile(bad=[1, 2], errors=3), [1, 2], steps=3) == [set(), {"1", "2"}, {"1", "2"}]


def test_a_method_that_raises_for_every_sequence_is_asked_for_each_twice() -> None:
    method = Fragile(bad=[1, 2])
    assert drafted(method, [1, 2], steps=5) == [set()] * 5
    assert len(method.rows) == 8
