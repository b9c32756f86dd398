"""A latency model: how long a call takes, by its rows and its size, learned online.

The model is `slowdown × (table(size) + rows × row_seconds)`. The table holds a decayed mean per bucket of sizes. It is
made monotone and interpolated between its knots, so it can represent a constant followed by a line, or stairs. The
slowdown follows changes that affect all sizes at once (other load on the machine, longer contexts). It returns to 1 as
the table learns them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import le

from cluster.core.verification import StepSample
from cluster.speculation.constants import (
    KNOT_DECAY,
    KNOT_MEMORY,
    MAX_SLOWDOWN,
    MIN_KNOT_WEIGHT,
    MIN_LATENCY_SECONDS,
    OUTLIER_FACTOR,
    OUTLIER_MIN_SAMPLES,
    ROW_RATE,
    SLOWDOWN_DECAY,
    SLOWDOWN_RATE,
)


@dataclass(slots=True)
class _Knot:
    """The mean duration in one bucket of sizes."""

    bucket: int
    size: float
    """Mean size of the bucket's samples."""
    seconds: float
    """Mean duration at slowdown 1, without the share of the rows, in seconds."""
    weight: float
    """Weight of the mean after its latest sample, in samples."""
    latest: int
    """Number of the model's sample that was its latest."""

    def weight_after(self, samples: int) -> float:
        """Weight of the mean when the model has `samples` samples: it falls with each one of another bucket."""
        return max(MIN_KNOT_WEIGHT, self.weight * KNOT_DECAY ** (samples - self.latest))


class LatencyModel:
    """Predicts durations. To add a sample takes a few microseconds, since it happens in every round."""

    def __init__(self, floor_seconds: float = 1e-3, row_seconds: float = 0.0, *, grows_from_zero: bool = False) -> None:
        """`floor_seconds` is the prediction before any sample, and `row_seconds` what one row adds for any size.

        With `grows_from_zero`, size 0 takes almost no time: sizes below the smallest sample take less time than it.
        """
        self._floor_seconds = floor_seconds
        self._grows_from_zero = grows_from_zero
        self._row_seconds = row_seconds
        self._slowdown = 1.0
        self._slowdown_samples = 0
        """Number of samples that the slowdown was learned from."""
        self._samples = 0
        self._knots: list[_Knot] = []
        """The table: one knot per observed bucket, in order of size."""
        self._line: tuple[list[float], list[float]] | None = None
        """Sizes and seconds of the knots, made monotone; `None` after a change of the table."""

    @classmethod
    def of_profile(cls, profile: Iterable[StepSample]) -> LatencyModel:
        """Return the model of a target from the step durations that it measured during warm-up."""
        ordered = sorted(profile, key=lambda sample: (sample.rows, sample.tokens))
        row_seconds = _row_seconds(ordered)
        model = cls(row_seconds=row_seconds)
        for sample in ordered:
            model.observe(sample.rows, sample.tokens, sample.seconds)
            model._slowdown, model._slowdown_samples, model._row_seconds = 1.0, 0, row_seconds
        return model

    @property
    def has_samples(self) -> bool:
        """Whether anything was observed."""
        return bool(self._knots)

    @property
    def knows_speed(self) -> bool:
        """Whether several samples were observed since the profile, which may be of a different speed."""
        return self._slowdown_samples >= OUTLIER_MIN_SAMPLES

    def covers(self, size: int) -> bool:
        """Whether a size as small as `size` was observed."""
        return bool(self._knots) and self._knots[0].size <= size

    def reaches(self, size: int) -> bool:
        """Whether a size as large as `size` was observed."""
        return size == 0 or (bool(self._knots) and bucket_of(size) <= self._knots[-1].bucket)

    def seconds(self, rows: int, size: int) -> float:
        """Predicted duration in seconds; it never falls as `size` grows."""
        return self._slowdown * (self._interpolate(size) + rows * self._row_seconds)

    def seconds_upto(self, rows: int, first: int, last: int) -> list[float]:
        """`seconds` for every size from `first` to `last`."""
        base = rows * self._row_seconds
        return [self._slowdown * (self._interpolate(size) + base) for size in range(first, last + 1)]

    def observe(self, rows: int, size: int, seconds: float) -> None:
        """Add a sample: a duration in seconds."""
        bucket, seconds = bucket_of(size), max(MIN_LATENCY_SECONDS, seconds)
        place = bisect_left(self._knots, bucket, key=lambda knot: knot.bucket)
        is_known = place < len(self._knots) and self._knots[place].bucket == bucket
        row_seconds = self._row_seconds
        if is_known:  # elsewhere the prediction is an extrapolation and does not show the slowdown
            expected = max(MIN_LATENCY_SECONDS, self.seconds(rows, size))
            if self._slowdown_samples >= OUTLIER_MIN_SAMPLES:
                seconds = min(max(seconds, expected / OUTLIER_FACTOR), expected * OUTLIER_FACTOR)
            self._observe_slowdown(seconds / expected)
            if rows > 1:  # with a single row, the share of the row cannot be separated
                row_seconds += ROW_RATE * (seconds - expected) * rows / (rows * rows + KNOT_MEMORY)
        self._row_seconds = max(0.0, row_seconds)
        value = max(MIN_LATENCY_SECONDS, seconds / self._slowdown - rows * self._row_seconds)
        if is_known:
            self._update(self._knots[place], size, value)
        else:
            self._knots.insert(place, _Knot(bucket, size, value, 1.0, self._samples + 1))
        self._samples += 1
        self._line = None

    def _observe_slowdown(self, factor: float) -> None:
        """Follow a sample that took `factor` times as long as predicted."""
        slowdown = self._slowdown * factor ** max(SLOWDOWN_RATE, 1 / (1 + self._slowdown_samples))
        self._slowdown = min(max(slowdown**SLOWDOWN_DECAY, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN)
        self._slowdown_samples += 1

    def _update(self, knot: _Knot, size: int, value: float) -> None:
        """Add the next sample of the model to the means of its knot."""
        weight = min(knot.weight_after(self._samples) + 1, KNOT_MEMORY)
        knot.size += (size - knot.size) / weight
        knot.seconds += (value - knot.seconds) / weight
        knot.weight, knot.latest = weight, self._samples + 1

    def _interpolate(self, size: int) -> float:
        """Seconds from the table: linear between knots, constant before the first, extrapolated beyond the last."""
        if not self._knots:
            return self._floor_seconds
        if self._line is None:
            self._line = [knot.size for knot in self._knots], _monotone(self._knots, self._samples)
        sizes, seconds = self._line
        above = min(bisect_right(sizes, size), len(sizes) - 1)
        if above == 0:
            return seconds[0] * min(1.0, size / sizes[0]) if self._grows_from_zero else seconds[0]
        left, low = sizes[above - 1], seconds[above - 1]
        return low + (seconds[above] - low) * (size - left) / (sizes[above] - left)


def bucket_of(size: int) -> int:
    """The bucket of a size: one for each size up to 8, then four to an octave.

    A bucket ends with a multiple of its width, because kernels compute in tiles: one token more starts another tile.
    """
    if size <= 8:
        return size
    octave = (size - 1).bit_length() - 1
    return 9 + 4 * (octave - 3) + (((size - 1) >> (octave - 2)) & 3)


def _monotone(knots: Sequence[_Knot], samples: int) -> list[float]:
    """Seconds of the knots, with falling neighbours levelled to their weighted mean (pool adjacent violators)."""
    values = [knot.seconds for knot in knots]
    if all(map(le, values, values[1:])):
        return values
    pools: list[tuple[float, float, int]] = []
    for knot in knots:
        seconds, weight, count = knot.seconds, knot.weight_after(samples), 1
        while pools and pools[-1][0] > seconds:
            before, before_weight, before_count = pools.pop()
            seconds = (seconds * weight + before * before_weight) / (weight + before_weight)
            weight += before_weight
            count += before_count
        pools.append((seconds, weight, count))
    return [seconds for seconds, _, count in pools for _ in range(count)]


def _row_seconds(samples: list[StepSample]) -> float:
    """Time of one row without its tokens, in seconds, from steps with as many tokens in fewer and in more rows."""
    fewest: dict[int, StepSample] = {}
    slopes: list[float] = []
    for sample in samples:
        first = fewest.setdefault(sample.tokens, sample)
        if sample.rows > first.rows:
            slopes.append((sample.seconds - first.seconds) / (sample.rows - first.rows))
    return max(0.0, sorted(slopes)[len(slopes) // 2]) if slopes else 0.0
