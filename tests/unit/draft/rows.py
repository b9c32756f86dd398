"""Rows and evidence of one random text, for drafters that read hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.core.drafting import DraftBudget, DraftRow, Evidence, Proposal
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models.drafting_evidence import shown_states

SIZE, TAPS = 48, (1, 2)
BUDGET = DraftBudget(8, 4)
GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, seed=7)
generator = torch.Generator().manual_seed(3)
STATES = torch.randn(200, len(TAPS) * SIZE, generator=generator).bfloat16()
"""Hidden states of one text of 200 tokens."""
TOKENS = [int(token) for token in torch.randint(0, 96, (200,), generator=generator)]


def shown(first: int, end: int) -> Evidence:
    """The hidden states of positions of the text."""
    return shown_states(STATES[first:end], first)


def row(
    length: int,
    known: int = 0,
    evidence: Sequence[Evidence] = (),
    *,
    name: str = "a",
    sampling: SamplingParameters = GREEDY,
    budget: DraftBudget = BUDGET,
    salt: str = "",
) -> DraftRow:
    """A row for the first `length` tokens of the text, of which the drafter holds `known`."""
    start = SequenceStart(4, sampling, salt) if known == 0 else None
    return DraftRow(SequenceId(name), length, tuple(TOKENS[known:length]), budget, start, tuple(evidence))


def draft(drafter: DraftMethod, *rows: DraftRow) -> Proposal:
    """The proposal for the last row, each row being sent in a call of its own."""
    return [drafter.propose([one])[0] for one in rows][-1]
