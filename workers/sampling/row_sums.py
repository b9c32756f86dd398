"""Sums of the rows of a matrix, and draws by them, by operations on single numbers.

A library's sum of rows, and its running sum, adds in an order that depends on how many rows there are. Here the size of
a row alone decides it, so that neighbours never change a row's rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def sums_by_halves(numbers: Tensor) -> Tensor:
    """The sum of each row of numbers [n, size]: [n]. Overwrites the numbers.

    Each half of a row is added to the other, until one number is left. What is returned holds none of the numbers in
    memory.
    """
    while (width := numbers.shape[1]) > 1:
        half = (width + 1) // 2
        numbers[:, : width - half] += numbers[:, half:]
        numbers = numbers[:, :half]
    return numbers.squeeze(1).clone()


def drawn_by_pairs(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row of weights ≥ 0 [n, size], a column with a weight, or -1 if all weights are 0: int64 [n].

    It is the one at which the sum of the weights so far exceeds the row's uniform number, of [n, 1], times their sum;
    for the number 1, the last one with a weight.
    """
    levels: list[Tensor] = []
    while weights.shape[1] > 1:
        even = functional.pad(weights, (0, 1)) if weights.shape[1] % 2 else weights
        levels.append(even.view(len(even), -1, 2))
        weights = levels[-1][:, :, 0] + levels[-1][:, :, 1]
    wanted, found = numbers * weights, torch.zeros_like(weights, dtype=torch.int64)
    for pairs in reversed(levels):
        left, right = pairs.take_along_dim(found[:, :, None], dim=1).unbind(dim=2)
        is_right = (wanted >= left) & (right > 0.0)
        wanted, found = wanted - left * is_right, 2 * found + is_right
    return found.masked_fill(~(weights > 0.0), -1).squeeze(1)
