"""Sums and draws of rows depend on no other row, and are those of a library up to rounding."""

from __future__ import annotations

import math

import pytest
import torch

from workers.sampling.row_sums import drawn_by_pairs, sums_by_halves

SIZES = (1, 2, 3, 10, 1000, 4097)


def rows(size: int, count: int = 7) -> torch.Tensor:
    """Weights, of which a third is 0."""
    weights = torch.rand(count, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return weights * (weights > 0.33)


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_halves_are_those_of_a_library_up_to_rounding(size: int) -> None:
    torch.testing.assert_close(sums_by_halves(rows(size)), rows(size).sum(dim=1), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("count", [1, 7])
def test_sums_keep_no_rows_in_memory(count: int) -> None:
    """Rows are summed in chunks, so that not all of them are in memory in float64 at a time."""
    assert sums_by_halves(rows(1000, count)).untyped_storage().nbytes() == 8 * count


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_where_the_running_sum_exceeds_the_share_of_the_whole(size: int) -> None:
    weights = rows(size, 200)
    weights[0] = 0.0
    numbers = torch.rand(200, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    running = weights.cumsum(dim=1)
    expected = torch.searchsorted(running, numbers * running[:, -1:], right=True).squeeze(1)
    assert drawn_by_pairs(weights, numbers).tolist() == [
        token if total > 0.0 else -1 for token, total in zip(expected.tolist(), running[:, -1].tolist(), strict=True)
    ]


@pytest.mark.parametrize("number", [0.0, math.nextafter(1.0, 0.0), 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_draw_with_the_least_or_the_largest_number_has_a_weight(size: int, number: float) -> None:
    weights = rows(size, 50)
    found = drawn_by_pairs(weights, torch.full((50, 1), number, dtype=torch.float64))
    for row, token in zip(weights, found.tolist(), strict=True):
        with_weight = row.nonzero().flatten().tolist() or [-1]
        assert token == with_weight[0 if number == 0.0 else -1]


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("size", SIZES)
def test_neighbours_change_no_bit(size: int, poison: float) -> None:
    numbers = torch.full((7, 1), 0.4, dtype=torch.float64)
    alone = sums_by_halves(rows(size)[3:4]), drawn_by_pairs(rows(size)[3:4], numbers[3:4])
    poisoned = torch.full_like(rows(size), poison)
    poisoned[3] = rows(size)[3]
    drawn = drawn_by_pairs(poisoned, numbers)
    assert torch.equal(sums_by_halves(poisoned)[3:4], alone[0])
    assert torch.equal(drawn[3:4], alone[1])
