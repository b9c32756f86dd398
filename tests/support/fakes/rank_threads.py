"""Ranks of a group as threads of this process, of which one at a time runs from exchange to exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")
_TIMEOUT_SECONDS = 60.0


class RankThreads:
    """What ranks exchange. Triton's interpreter has a global state, so no two of them compute at once."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[int] = []
        """Bytes that the first rank sent in each exchange."""
        self._ranks = ranks
        self._computes, self._barrier = threading.Lock(), threading.Barrier(ranks)
        self._parts: dict[int, torch.Tensor] = {}

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """What a function returns on each rank. Raises what it raises on one of them."""

        def on_rank(rank: int) -> Result:
            try:
                with self._computes:
                    return function(rank)
            except threading.BrokenBarrierError:
                raise
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self._ranks) as pool:
            running = [pool.submit(on_rank, rank) for rank in range(self._ranks)]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error
        return [one.result() for one in running]

    def all_gather(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors `[ranks, …]`."""
        self._parts[rank] = own.clone()
        if rank == 0:
            self.sent.append(own.nbytes)
        with self._others_compute():
            self._barrier.wait(_TIMEOUT_SECONDS)
            found = torch.stack([self._parts[one] for one in range(self._ranks)])
            self._barrier.wait(_TIMEOUT_SECONDS)
        return found

    @contextmanager
    def _others_compute(self) -> Iterator[None]:
        self._computes.release()
        try:
            yield
        finally:
            self._computes.acquire()
