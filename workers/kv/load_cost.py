"""Decides whether loading offloaded blocks is faster than computing their tokens again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MEMORY = 0.9
"""Factor by which each measurement's weight shrinks with every further one of its kind."""
_FEWEST_TOKENS = 32
"""A step with fewer tokens mostly reads the weights, so its time does not measure prompt processing."""


class Medium(Enum):
    """The storage of an offloaded block."""

    HOST = "host"
    DISK = "disk"


@dataclass(slots=True)
class _Rate:
    """Seconds per unit, as a ratio of decayed sums: large measurements weigh more."""

    seconds: float
    units: float

    @property
    def seconds_per_unit(self) -> float:
        return self.seconds / self.units

    def record(self, units: float, seconds: float) -> None:
        self.seconds = self.seconds * _MEMORY + seconds
        self.units = self.units * _MEMORY + units


class CostModel:
    """Decayed means of the measured speed of loading and of computing.

    Before any measurement, it assumes that loading is slow (1 GB/s from the host, 100 MB/s from disk) and computing
    fast (20,000 tokens/s). Each decision against loading moves the loading speed a little towards this assumption,
    so that one slow copy does not disable a tier for ever.
    """

    def __init__(self) -> None:
        self._seeds = {Medium.HOST: 1e-9, Medium.DISK: 1e-8}  # seconds per byte
        self._loading = {medium: _Rate(seed * 1e6, 1e6) for medium, seed in self._seeds.items()}
        self._computing = _Rate(5e-5, 1.0)

    def record_load(self, medium: Medium, loaded_bytes: int, seconds: float) -> None:
        """Record that copying `loaded_bytes` from `medium` into the pool took `seconds`."""
        self._loading[medium].record(loaded_bytes, seconds)

    def record_compute(self, tokens: int, prompt_tokens: int, seconds: float) -> None:
        """Record that the device computed a step of `tokens` tokens in `seconds`.

        `prompt_tokens` of them belong to prompts or replays. Only steps of mostly prompt tokens count: the others spend
        their time on reading the weights and the KV of many sequences.
        """
        if tokens >= _FEWEST_TOKENS and 2 * prompt_tokens >= tokens:
            self._computing.record(tokens, seconds)

    def worth_loading(self, host_bytes: int, disk_bytes: int, tokens: int) -> bool:
        """Whether loading these bytes takes less time than computing `tokens` tokens."""
        sizes = {Medium.HOST: host_bytes, Medium.DISK: disk_bytes}
        loading = sum(size * self._loading[medium].seconds_per_unit for medium, size in sizes.items())
        if loading < tokens * self._computing.seconds_per_unit:
            return True
        for medium, size in sizes.items():
            if size:
                self._loading[medium].record(1e4, self._seeds[medium] * 1e4)
        return False
