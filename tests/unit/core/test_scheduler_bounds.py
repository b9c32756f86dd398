"""The bounds of requests and of draft budgets."""

from __future__ import annotations

import pytest

from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.scheduling.allocation import clip_draft


@pytest.mark.parametrize(
    ("wanted", "of_the_request", "remaining", "clipped"),
    [
        (None, None, 100, DraftBudget(8, 5)),
        (DraftBudget(99, 99), None, 100, DraftBudget(8, 5)),
        (DraftBudget(6, 4), None, 100, DraftBudget(6, 4)),
        (DraftBudget(6, 4), 3, 100, DraftBudget(3, 3)),
        (None, 3, 100, DraftBudget(3, 3)),
        (None, None, 3, DraftBudget(8, 2)),
        (None, None, 1, NO_DRAFT),
        (None, 0, 100, NO_DRAFT),
        (DraftBudget(0, 0), None, 100, NO_DRAFT),
    ],
    ids=str,
)
def test_a_draft_is_clipped_to_every_bound(
    wanted: DraftBudget | None, of_the_request: int | None, remaining: int, clipped: DraftBudget
) -> None:
    assert clip_draft(wanted, DraftBudget(8, 5), of_the_request, remaining) == clipped
