"""The best tokens of a row are those that sorting finds."""

from __future__ import annotations

import pytest
import torch

from workers.verify.decider import most_probable


@pytest.mark.parametrize("size", [5, 64, 640, 1000, 49152])
@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_best_tokens_are_those_of_a_sort(rows: int, count: int, size: int) -> None:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    expected = logits.sort(descending=True).indices[:, :count]
    assert most_probable(logits, count).tolist() == expected.tolist()


def test_the_best_tokens_may_share_a_block_or_follow_the_last_one() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [70, 71, 72]] = torch.tensor([3.0, 2.0, 1.0])
    logits[1, [999, 0, 998]] = torch.tensor([3.0, 2.0, 1.0])
    assert most_probable(logits, 3).tolist() == [[70, 71, 72], [999, 0, 998]]


def test_excluded_tokens_come_last() -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, [299, 5]] = torch.tensor([1.0, 2.0])
    assert most_probable(logits, 2).tolist() == [[5, 299]]
