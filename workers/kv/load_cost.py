"""Whether a block is sooner copied back or computed again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MEMORY = 0.9
"""What a measurement weighs after one further of its kind."""
_FEWEST_TOKENS = 32
"""A pass over fewer tokens waits for the weights: it says nothing about a prompt's price."""


class Medium(Enum):
    """Where a saved block lies."""

    HOST = "host"
    DISK = "disk"


@dataclass(slots=True)
class _Price:
    """Seconds per unit: a ratio of decayed sums, so that large measurements weigh more."""

    seconds: float
    units: float

    @property
    def each(self) -> float:
        return self.seconds / self.units

    def note(self, units: float, seconds: float) -> None:
        self.seconds = self.seconds * _MEMORY + seconds
        self.units = self.units * _MEMORY + units


@dataclass(slots=True)
class _Steps:
    """Consecutive ones, of which only the last was waited for."""

    tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, prompt_tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens
        self.seconds += seconds


class CostModel:
    """What was measured of loading and of computing, each a decayed mean.

    Until then loading is taken for slow (1 GB/s from the host, 100 MB/s from disk) and computing for fast
    (20,000 tokens/s). A refusal moves the price of loading a little back to where it began: one slow copy does not
    close a tier for good.
    """

    def __init__(self) -> None:
        self._seeds = {Medium.HOST: 1e-9, Medium.DISK: 1e-8}  # seconds per byte
        self._loading = {medium: _Price(seed * 1e6, 1e6) for medium, seed in self._seeds.items()}
        self._computing = _Price(5e-5, 1.0)
        self._since = _Steps()

    def record_load(self, medium: Medium, loaded_bytes: int, seconds: float) -> None:
        """`loaded_bytes` were copied into the pool."""
        self._loading[medium].note(loaded_bytes, seconds)

    def record_compute(self, tokens: int, prompt_tokens: int, seconds: float, *, awaited: bool = True) -> None:
        """A step of `seconds` computed `tokens` tokens, of which `prompt_tokens` belong to prompts (or replays).

        Only steps that are mostly prompt say what a prompt's token costs: others read all weights, and the memory of
        many sequences, for a few tokens. Without `awaited` the device may still be at work when the step returns: it
        counts together with those after it, up to the first that was waited for.
        """
        self._since.add(tokens, prompt_tokens, seconds)
        if not awaited:
            return
        steps, self._since = self._since, _Steps()
        if steps.tokens >= _FEWEST_TOKENS and 2 * steps.prompt_tokens >= steps.tokens:
            self._computing.note(steps.tokens, steps.seconds)

    def worth_loading(self, host_bytes: int, disk_bytes: int, tokens: int) -> bool:
        """Whether copying so many bytes takes less time than computing `tokens` tokens."""
        sizes = {Medium.HOST: host_bytes, Medium.DISK: disk_bytes}
        loading = sum(size * self._loading[medium].each for medium, size in sizes.items())
        if loading < tokens * self._computing.each:
            return True
        for medium, size in sizes.items():
            if size:
                self._loading[medium].note(1e4, self._seeds[medium] * 1e4)
        return False
