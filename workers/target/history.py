"""The tokens before a decision, without copying them for every node of every tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import overload


class History(Sequence[int]):
    """Several token runs read as one. Knows its length at once; is copied only when sliced."""

    __slots__ = ("_len", "_runs")

    def __init__(self, *runs: Sequence[int]) -> None:
        self._runs = runs
        self._len = sum(len(run) for run in runs)

    def extended(self, run: Sequence[int]) -> History:
        """This history and one run more."""
        return History(*self._runs, run)

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return list(chain(*self._runs))[index]
