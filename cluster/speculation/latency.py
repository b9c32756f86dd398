"""How long something takes, by its rows and its size: learned from what was seen, asked for what was not.

The law is `pace × (table(size) + rows × row_seconds)`. The table holds a decayed mean per bucket of sizes, made
monotone and read between its knots, so it can show a floor that turns into a line, or stairs. The pace follows whatever
slows everything down at once (a neighbour, longer contexts), and fades as the table learns it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.core.verification import StepSample

MEMORY = 16
"""Samples that a knot's mean remembers."""
_PACE = 0.125
_FADING = 0.99
_MOST_PACE = 1000.0
_AGING = 0.99
_STALE = 0.5
"""Samples that an old mean counts for, at least."""
_ROW_RATE = 0.02
_STRETCH = 2.0
"""A sample further than this factor from what was expected counts as if it were that far: one hiccup teaches little."""
_FEW = 3
"""Samples after which that holds: a profile may have been measured at quite another pace."""
_LEAST_SECONDS = 1e-7


@dataclass(frozen=True, slots=True)
class Knot:
    """One bucket of sizes."""

    bucket: int
    size: float
    """Mean size of its samples."""
    seconds: float
    """Mean duration at pace 1, without its rows' share."""
    weight: float


@dataclass(frozen=True, slots=True)
class Durations:
    """A value: `learned` gives another one."""

    floor_seconds: float = 1e-3
    """What is expected before anything was seen."""
    row_seconds: float = 0.0
    grows_from_zero: bool = False
    """Whether size 0 takes next to nothing: smaller sizes than any seen are then expected to take less."""
    pace: float = 1.0
    seen: int = 0
    """Samples that set the pace."""
    knots: tuple[Knot, ...] = ()
    """In order of size."""
    line: tuple[tuple[float, float], ...] = ()
    """The knots' (size, seconds), made monotone."""

    @classmethod
    def of_profile(cls, profile: Iterable[StepSample]) -> Durations:
        """What a target measured of its own steps before anybody waited for them."""
        samples = sorted(profile, key=lambda sample: (sample.rows, sample.tokens))
        durations = cls(row_seconds=_row_seconds(samples))
        row_seconds = durations.row_seconds
        for sample in samples:
            durations = durations.learned(sample.rows, sample.tokens, sample.seconds)
            durations = replace(durations, pace=1.0, seen=0, row_seconds=row_seconds)
        return durations

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return bool(self.knots)

    def knows(self, size: int) -> bool:
        """Whether anything was seen that is as small."""
        return bool(self.line) and self.line[0][0] <= size

    def seconds(self, rows: int, size: int) -> float:
        """What is expected; never less for a larger size."""
        return self.pace * (self._read(size) + rows * self.row_seconds)

    def seconds_upto(self, rows: int, first: int, last: int) -> list[float]:
        """`seconds` for every size from `first` to `last`."""
        base = rows * self.row_seconds
        return [self.pace * (self._read(size) + base) for size in range(first, last + 1)]

    def learned(self, rows: int, size: int, seconds: float) -> Durations:
        """With one more sample."""
        bucket, seconds = bucket_of(size), max(_LEAST_SECONDS, seconds)
        known = next((knot for knot in self.knots if knot.bucket == bucket), None)
        expected = max(_LEAST_SECONDS, self.seconds(rows, size))
        pace, row_seconds = self.pace, self.row_seconds
        seen = self.seen
        if known is not None:  # elsewhere, what was expected was a guess, and says nothing of the pace
            if seen >= _FEW:
                seconds = min(max(seconds, expected / _STRETCH), expected * _STRETCH)
            pace = (pace * (seconds / expected) ** max(_PACE, 1 / (1 + seen))) ** _FADING
            pace = min(max(pace, 1 / _MOST_PACE), _MOST_PACE)
            if rows > 1:  # of a row alone one cannot tell what is its own share
                row_seconds += _ROW_RATE * (seconds - expected) * rows / (rows * rows + MEMORY)
            seen += 1
        value = max(_LEAST_SECONDS, seconds / pace - rows * max(0.0, row_seconds))
        others = (replace(knot, weight=max(_STALE, knot.weight * _AGING)) for knot in self.knots if knot is not known)
        ordered = tuple(sorted((*others, _moved(known, bucket, size, value)), key=lambda knot: knot.bucket))
        return replace(
            self, row_seconds=max(0.0, row_seconds), pace=pace, seen=seen, knots=ordered, line=_monotone(ordered)
        )

    def _read(self, size: int) -> float:
        """The table between its knots; before the first one flat, beyond the last one straight on."""
        line = self.line
        if not line:
            return self.floor_seconds
        above = min(bisect_right(line, (float(size), float("inf"))), len(line) - 1)
        if above == 0:
            first, seconds = line[0]
            return seconds * min(1.0, size / first) if self.grows_from_zero else seconds
        (left, low), (right, high) = line[above - 1], line[above]
        return low + (high - low) * (size - left) / (right - left)


def bucket_of(size: int) -> int:
    """Each size up to 8 for itself, then four buckets to an octave.

    A bucket ends with a multiple of its width: kernels work in tiles, and what overflows one is another matter.
    """
    if size <= 8:
        return size
    octave = (size - 1).bit_length() - 1
    return 9 + 4 * (octave - 3) + (((size - 1) >> (octave - 2)) & 3)


def _moved(known: Knot | None, bucket: int, size: int, seconds: float) -> Knot:
    if known is None:
        return Knot(bucket, size, seconds, 1.0)
    weight = min(known.weight + 1, MEMORY)
    return Knot(
        bucket, known.size + (size - known.size) / weight, known.seconds + (seconds - known.seconds) / weight, weight
    )


def _monotone(knots: tuple[Knot, ...]) -> tuple[tuple[float, float], ...]:
    """Neighbours that fall are levelled to their weighted mean (pool adjacent violators)."""
    pools: list[tuple[float, float, list[Knot]]] = []
    for knot in knots:
        seconds, weight, members = knot.seconds, knot.weight, [knot]
        while pools and pools[-1][0] > seconds:
            before, before_weight, earlier = pools.pop()
            seconds = (seconds * weight + before * before_weight) / (weight + before_weight)
            weight += before_weight
            members = earlier + members
        pools.append((seconds, weight, members))
    return tuple((member.size, seconds) for seconds, _, members in pools for member in members)


def _row_seconds(samples: list[StepSample]) -> float:
    """What a row costs beside its tokens: from steps of as many tokens in fewer and in more rows."""
    fewest: dict[int, StepSample] = {}
    slopes: list[float] = []
    for sample in samples:
        first = fewest.setdefault(sample.tokens, sample)
        if sample.rows > first.rows:
            slopes.append((sample.seconds - first.seconds) / (sample.rows - first.rows))
    return max(0.0, sorted(slopes)[len(slopes) // 2]) if slopes else 0.0
