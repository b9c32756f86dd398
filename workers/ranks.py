"""What the ranks of a tensor-parallel group agree on."""

from __future__ import annotations

import torch
from torch import distributed


def least_of_all_ranks(number: int, ranks: int) -> int:
    """The smallest of the numbers that `ranks` ranks give. All of them call this together."""
    if ranks == 1:
        return number
    least = torch.tensor(number)
    distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
    return int(least)
