"""How the ranks of a tensor-parallel group sum, agree, and fail together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

Result = TypeVar("Result")

UNBOUNDED = timedelta(days=365)
"""Timeout of collectives that may wait for as long as another rank takes, in place of none, which torch does not know.

The owner of the ranks bounds the time in which they load, and a worker rank waits for its next command for as long as
the cluster is idle. When a rank dies, its connections close, and the other ranks notice this at once."""


class AnotherRankFailed(Exception):
    """Another rank raised in what all ranks tried together."""


_is_trying = False
"""Whether a function of `try_together` runs."""


def least_of_all_ranks(number: int, ranks: int) -> int:
    """The smallest of the numbers that `ranks` ranks give. All of them call this together."""
    if ranks == 1:
        return number
    least = torch.tensor(number)
    distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
    return int(least)


def sum_over_ranks(part: torch.Tensor) -> None:
    """Replace a tensor by the sum of all ranks' tensors, in place. All ranks call this together.

    Inside `try_together` it raises `AnotherRankFailed` if another rank does not come here, because it raised.
    """
    begin_sum_over_ranks(part)()


def begin_sum_over_ranks(part: torch.Tensor) -> Callable[[], None]:
    """Begin what `sum_over_ranks` does. What is returned waits for the end; on a GPU the host does not.

    All ranks begin their sums in one order. Between the beginning and the end the tensor is not used. On a GPU what is
    launched meanwhile runs beside the sum, also in a CUDA graph.
    """
    if _is_trying and not least_of_all_ranks(1, distributed.get_world_size()):
        raise AnotherRankFailed("another rank cannot compute it")
    work = distributed.all_reduce(part, async_op=True)

    def wait() -> None:
        if work is not None:
            work.wait()

    return wait


def try_together(function: Callable[[], Result], ranks: int) -> Result:
    """Call a function on all ranks, and raise on all of them if it raises on one.

    That one raises its own error, and the others `AnotherRankFailed`. Without this, a rank that raises and carries on
    leaves the others in a sum to which it never comes. All sums of the function must be those of `sum_over_ranks`:
    before each of them, the ranks agree that none has raised.
    """
    global _is_trying
    if ranks == 1:
        return function()
    _is_trying = True
    try:
        result = function()
    except AnotherRankFailed:
        raise
    except Exception:
        least_of_all_ranks(0, ranks)  # the other ranks ask at their next sum, or at the end
        raise
    finally:
        _is_trying = False
    if not least_of_all_ranks(1, ranks):
        raise AnotherRankFailed("another rank cannot compute it")
    return result


def bound_collectives(seconds: float, ranks: int) -> None:
    """From now on, let a collective fail that waits longer than `seconds` for another rank.

    All ranks call this together, and it returns once all of them have.
    """
    if ranks == 1:
        return
    least_of_all_ranks(0, ranks)
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))  # of the group that all ranks are in
