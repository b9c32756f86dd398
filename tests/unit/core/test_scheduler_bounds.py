"""The bounds of requests and of draft budgets."""

from __future__ import annotations

import pytest

from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.errors import InvalidRequest
from cluster.core.kv import check_fits
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


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "field"),
    [(0, 1, "prompt"), (1, 0, "max_tokens"), (100, 1, "prompt"), (99, 2, "max_tokens"), (60, 21, "max_tokens")],
)
def test_a_request_that_could_never_finish_is_refused(prompt_len: int, max_tokens: int, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_fits(prompt_len, max_tokens, max_context_len=100, pool_tokens=80 if prompt_len == 60 else 1000)
    assert refusal.value.field == field


def test_a_request_that_fits_to_the_last_token_is_accepted() -> None:
    check_fits(60, 20, max_context_len=80, pool_tokens=80)
