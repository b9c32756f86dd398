"""How the ranks of a tensor-parallel group sum, agree, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from typing import TypeVar

import torch
from torch import distributed

Result = TypeVar("Result")
Wait = Callable[[], None]
"""Waits for the end of what was begun."""
BeginSum = Callable[[torch.Tensor], Wait | None]
"""Begins to replace a tensor by the sum of all ranks' tensors. `None`, on all ranks alike: it leaves this tensor to the
process group."""

UNBOUNDED = timedelta(days=365)
"""Timeout of collectives that may wait for as long as another rank takes, in place of none, which torch does not know.

The owner of the ranks bounds the time in which they load, and a worker rank waits for its next command for as long as
the cluster is idle. When a rank dies, its connections close, and the other ranks notice this at once."""


_MOST_GATHERED_BYTES = 1 << 20


class AnotherRankFailed(RuntimeError):
    """Another rank raised in what all ranks do together, or has left the group. That rank's error says why."""


_FAILED = torch.iinfo(torch.int64).min
"""What a rank that has failed answers the others' next question."""


class _State:
    """What this process knows of its group."""

    asks_before_sums = False
    """Whether a sum first asks whether all ranks come to it."""
    has_failed = False
    """Whether a rank has failed, and answers no more questions."""
    begin_sum: BeginSum | None = None
    """What is asked for each sum before the process group."""


def least_of_all_ranks(number: int, ranks: int) -> int:
    """The smallest of the numbers that `ranks` ranks give. All of them call this together.

    Raises `AnotherRankFailed` if one of them does not, because it has failed (see `failing_together`), left or hangs.
    """
    if ranks == 1:
        return number
    if _State.has_failed:
        raise AnotherRankFailed("another rank has failed")
    least = torch.tensor(number)
    try:
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
    except RuntimeError as error:
        raise AnotherRankFailed(f"another rank has left the group or hangs: {error}") from error
    if int(least) == _FAILED:
        _State.has_failed = True
        raise AnotherRankFailed("another rank has failed")
    return int(least)


def found_by_all(found: Result | None, ranks: int) -> Result | None:
    """What this rank has found on its machine, if all `ranks` have found something; else `None` on all of them.

    All ranks call this together. See `least_of_all_ranks`.
    """
    return found if least_of_all_ranks(int(found is not None), ranks) else None


def is_equal_on_all(text: str, ranks: int) -> bool:
    """Whether all `ranks` give the same text; the same answer on all of them. All ranks call this together."""
    number = int.from_bytes(blake2b(text.encode(), digest_size=7).digest())
    return least_of_all_ranks(number, ranks) == -least_of_all_ranks(-number, ranks)


def sum_over_ranks(part: torch.Tensor) -> None:
    """Replace a tensor by the sum of all ranks' tensors, in place. All ranks call this together.

    Inside `try_together` and `failing_together` it raises `AnotherRankFailed` if another rank does not come here.
    """
    begin_sum_over_ranks(part)()


def begin_sums_with(begin: BeginSum) -> None:
    """From now on, ask `begin` for each sum before the process group. All ranks call this together."""
    _State.begin_sum = begin


def begin_sum_over_ranks(part: torch.Tensor) -> Wait:
    """Begin what `sum_over_ranks` does. What is returned waits for the end; on a GPU the host does not.

    All ranks begin their sums in one order. Between the beginning and the end the tensor is not used. On a GPU what is
    launched meanwhile runs beside the sum, also in a CUDA graph. Three or more ranks on CPUs sum at once, in their
    order: gloo chooses another order for each size, so that bits would depend on how many rows a step has.
    """
    _check_all_come()
    if _State.begin_sum is not None and (begun := _State.begin_sum(part)) is not None:
        return begun
    if part.device.type == "cpu" and distributed.get_world_size() > 2:
        _sum_in_order(part)
        return lambda: None
    work = distributed.all_reduce(part, async_op=True)

    def wait() -> None:
        if work is not None:
            work.wait()

    return wait


def _sum_in_order(part: torch.Tensor) -> None:
    """Replace a contiguous tensor by `((first rank's + second's) + third's) + …`, in place.

    Every rank gathers and adds all of a small tensor. Of a large one, each adds an equal part, which all then gather.
    """
    ranks = distributed.get_world_size()
    if part.nbytes <= _MOST_GATHERED_BYTES:
        gathered = part.new_empty((ranks, *part.shape)).unbind()
        distributed.all_gather(list(gathered), part)
        _add_up(gathered, part)
        return
    size = -(-part.numel() // ranks)
    padded = part.new_zeros((ranks, size))
    padded.view(-1)[: part.numel()] = part.view(-1)
    received = torch.empty_like(padded)
    distributed.all_to_all_single(received, padded)
    own = torch.empty_like(received[0])
    _add_up(received.unbind(), own)
    distributed.all_gather(list(padded.unbind()), own)
    part.copy_(padded.view(-1)[: part.numel()].view_as(part))


def _add_up(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    torch.add(parts[0], parts[1], out=output)
    for one in parts[2:]:
        output.add_(one)


def largest_over_ranks(part: torch.Tensor) -> None:
    """Replace a tensor by the largest of all ranks' numbers, in place. See `sum_over_ranks`."""
    _check_all_come()
    distributed.all_reduce(part, op=distributed.ReduceOp.MAX)


def _check_all_come() -> None:
    if _State.asks_before_sums and not least_of_all_ranks(1, distributed.get_world_size()):
        raise AnotherRankFailed("another rank cannot compute it")


@contextmanager
def _asking() -> Iterator[None]:
    before, _State.asks_before_sums = _State.asks_before_sums, True
    try:
        yield
    finally:
        _State.asks_before_sums = before


def try_together(function: Callable[[], Result], ranks: int) -> Result:
    """Call a function on all ranks, and raise on all of them if it raises on one. All of them may carry on.

    That one raises its own error, and the others `AnotherRankFailed`. Without this, a rank that raises and carries on
    leaves the others in a sum to which it never comes. All sums of the function must be those of this module: before
    each of them, the ranks agree that none has raised.
    """
    if ranks == 1:
        return function()
    with _asking():
        try:
            result = function()
        except AnotherRankFailed:
            raise
        except Exception:
            least_of_all_ranks(0, ranks)  # the other ranks ask at their next sum, or at the end
            raise
    if not least_of_all_ranks(1, ranks):
        raise AnotherRankFailed("another rank cannot compute it")
    return result


@contextmanager
def failing_together(ranks: int) -> Iterator[None]:
    """Inside, what raises on one rank ends the group: the others raise `AnotherRankFailed` instead of waiting for it.

    They raise where they next ask (`least_of_all_ranks`, or before a sum), or at the end, which no rank passes before
    all have come there. A rank may do inside what the others do not, as long as it does not ask. The sums of modules of
    `transformers` do not ask: ask before such a pass.
    """
    if ranks == 1:
        yield
        return
    try:
        with _asking():
            yield
    except AnotherRankFailed:
        raise
    except Exception:
        if not _State.has_failed:
            _State.has_failed = True
            with suppress(RuntimeError):
                distributed.all_reduce(torch.tensor(_FAILED), op=distributed.ReduceOp.MIN)
        raise
    least_of_all_ranks(1, ranks)


def begin_group() -> None:
    """Forget a group of which this process was a rank."""
    _State.asks_before_sums = _State.has_failed = False
    _State.begin_sum = None


def bound_collectives(seconds: float, ranks: int) -> None:
    """From now on, let a collective fail that waits longer than `seconds` for another rank.

    All ranks call this together, and it returns once all of them have.
    """
    if ranks == 1:
        return
    least_of_all_ranks(0, ranks)
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))  # of the group that all ranks are in
