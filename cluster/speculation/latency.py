"""A latency model: how long a call takes, by its rows and its size, learned online.

The model is `slowdown × (table(size) + rows × row_seconds)`. The table holds a decayed mean per bucket of sizes. It is
made monotone and interpolated between its knots, so it can represent a constant followed by a line, or stairs. The
slowdown follows changes that affect all sizes at once (other load on the machine, longer contexts). It returns to 1 as
the table learns them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.core.verification import StepSample

MEMORY = 16
"""Number of recent samples that count in a knot's mean."""
_SLOWDOWN_RATE = 0.125
"""Share of a sample's deviation (in logarithms) that goes into the slowdown, once several samples are known."""
_SLOWDOWN_DECAY = 0.99
"""Exponent that pulls the slowdown back to 1 with each sample."""
_MAX_SLOWDOWN = 1000.0
"""Bound of the slowdown as a factor, in both directions."""
_WEIGHT_DECAY = 0.99
"""Factor on the weight of all other knots with each sample."""
_MIN_WEIGHT = 0.5
"""Smallest weight of a knot's old mean, in samples."""
_ROW_RATE = 0.02
"""Share of a sample's deviation that goes into `row_seconds`."""
_OUTLIER_FACTOR = 2.0
"""A sample further from the prediction than this factor is clipped to it, so that one outlier changes little."""
_OUTLIER_MIN_SAMPLES = 3
"""Samples after which outliers are clipped. A profile may have been measured at a different speed."""
_MIN_SECONDS = 1e-7


@dataclass(frozen=True, slots=True)
class Knot:
    """The mean duration in one bucket of sizes."""

    bucket: int
    size: float
    """Mean size of the bucket's samples."""
    seconds: float
    """Mean duration at slowdown 1, without the share of the rows, in seconds."""
    weight: float
    """Weight of the mean, in samples."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """An immutable latency model: `observed` returns an updated copy."""

    floor_seconds: float = 1e-3
    """Prediction before any sample, in seconds."""
    row_seconds: float = 0.0
    """Time that one row adds for any size, in seconds."""
    grows_from_zero: bool = False
    """Whether size 0 takes almost no time. If so, sizes below the smallest sample are predicted to take less time."""
    slowdown: float = 1.0
    """Current factor of all durations over the table."""
    samples: int = 0
    """Number of samples that the slowdown was learned from."""
    knots: tuple[Knot, ...] = ()
    """The table: one knot per observed bucket, in order of size."""
    line: tuple[tuple[float, float], ...] = ()
    """The knots' (size, seconds), made monotone."""

    @classmethod
    def of_profile(cls, profile: Iterable[StepSample]) -> LatencyModel:
        """Return the model of a target from the step durations that it measured during warm-up."""
        ordered = sorted(profile, key=lambda sample: (sample.rows, sample.tokens))
        model = cls(row_seconds=_row_seconds(ordered))
        row_seconds = model.row_seconds
        for sample in ordered:
            model = model.observed(sample.rows, sample.tokens, sample.seconds)
            model = replace(model, slowdown=1.0, samples=0, row_seconds=row_seconds)
        return model

    @property
    def has_samples(self) -> bool:
        """Whether anything was observed."""
        return bool(self.knots)

    def covers(self, size: int) -> bool:
        """Whether a size as small as `size` was observed."""
        return bool(self.line) and self.line[0][0] <= size

    def seconds(self, rows: int, size: int) -> float:
        """Predicted duration in seconds; it never falls as `size` grows."""
        return self.slowdown * (self._interpolate(size) + rows * self.row_seconds)

    def seconds_upto(self, rows: int, first: int, last: int) -> list[float]:
        """`seconds` for every size from `first` to `last`."""
        base = rows * self.row_seconds
        return [self.slowdown * (self._interpolate(size) + base) for size in range(first, last + 1)]

    def observed(self, rows: int, size: int, seconds: float) -> LatencyModel:
        """The model with one more sample."""
        bucket, seconds = bucket_of(size), max(_MIN_SECONDS, seconds)
        known = next((knot for knot in self.knots if knot.bucket == bucket), None)
        expected = max(_MIN_SECONDS, self.seconds(rows, size))
        slowdown, row_seconds = self.slowdown, self.row_seconds
        samples = self.samples
        if known is not None:  # elsewhere the prediction is an extrapolation and does not show the slowdown
            if samples >= _OUTLIER_MIN_SAMPLES:
                seconds = min(max(seconds, expected / _OUTLIER_FACTOR), expected * _OUTLIER_FACTOR)
            slowdown *= (seconds / expected) ** max(_SLOWDOWN_RATE, 1 / (1 + samples))
            slowdown = min(max(slowdown**_SLOWDOWN_DECAY, 1 / _MAX_SLOWDOWN), _MAX_SLOWDOWN)
            if rows > 1:  # with a single row, the share of the row cannot be separated
                row_seconds += _ROW_RATE * (seconds - expected) * rows / (rows * rows + MEMORY)
            samples += 1
        value = max(_MIN_SECONDS, seconds / slowdown - rows * max(0.0, row_seconds))
        others = (
            replace(knot, weight=max(_MIN_WEIGHT, knot.weight * _WEIGHT_DECAY))
            for knot in self.knots
            if knot is not known
        )
        ordered = tuple(sorted((*others, _updated(known, bucket, size, value)), key=lambda knot: knot.bucket))
        return replace(
            self,
            row_seconds=max(0.0, row_seconds),
            slowdown=slowdown,
            samples=samples,
            knots=ordered,
            line=_monotone(ordered),
        )

    def _interpolate(self, size: int) -> float:
        """Seconds from the table: linear between knots, constant before the first, extrapolated beyond the last."""
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
    """The bucket of a size: one for each size up to 8, then four to an octave.

    A bucket ends with a multiple of its width, because kernels compute in tiles: one token more starts another tile.
    """
    if size <= 8:
        return size
    octave = (size - 1).bit_length() - 1
    return 9 + 4 * (octave - 3) + (((size - 1) >> (octave - 2)) & 3)


def _updated(known: Knot | None, bucket: int, size: int, seconds: float) -> Knot:
    if known is None:
        return Knot(bucket, size, seconds, 1.0)
    weight = min(known.weight + 1, MEMORY)
    return Knot(
        bucket, known.size + (size - known.size) / weight, known.seconds + (seconds - known.seconds) / weight, weight
    )


def _monotone(knots: tuple[Knot, ...]) -> tuple[tuple[float, float], ...]:
    """Level neighbours that fall to their weighted mean (pool adjacent violators)."""
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
    """Time of one row without its tokens, in seconds, from steps with as many tokens in fewer and in more rows."""
    fewest: dict[int, StepSample] = {}
    slopes: list[float] = []
    for sample in samples:
        first = fewest.setdefault(sample.tokens, sample)
        if sample.rows > first.rows:
            slopes.append((sample.seconds - first.seconds) / (sample.rows - first.rows))
    return max(0.0, sorted(slopes)[len(slopes) // 2]) if slopes else 0.0
