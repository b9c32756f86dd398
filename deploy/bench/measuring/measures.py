"""The figures of a benchmark, computed from recorded passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deploy.bench.contestants.answers import BenchPass
from deploy.bench.measuring.results import Cost
from deploy.draft_origins import summed

QUANTILES = (0.5, 0.9, 0.99)
_MOST_POSITIONS = 8
"""Positions of a draft whose acceptance is shown."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repetitions."""

    median: float
    least: float
    most: float
    count: int

    def __str__(self) -> str:
        """`median (least–most)`, or the only value."""
        if self.count == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.least:.2f}–{self.most:.2f})"


def spread(values: Sequence[float]) -> Spread | None:
    """The spread of the values; `None` without values."""
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values (0 to 1) do not exceed; `None` without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def speed_ratios(plain: Sequence[BenchPass], passes: Sequence[BenchPass]) -> list[float]:
    """Each pass's rate divided by the mean rate of the plain passes before and after it.

    `plain` has one pass more than `passes`: plain, method, plain, method, …, plain. Without plain passes the list is
    empty. Raises `ValueError` for any other number of plain passes.
    """
    if not plain:
        return []
    if len(plain) != len(passes) + 1:
        raise ValueError(f"plain: needed {len(passes) + 1} passes around {len(passes)}, found {len(plain)}")
    around = [(before.rate + after.rate) / 2 for before, after in pairwise(plain)]
    return [found.rate / below for found, below in zip(passes, around, strict=True) if below > 0]


def drift(plain: Sequence[BenchPass]) -> list[float]:
    """The rate of each plain pass divided by the rate of the plain pass before it."""
    return [after.rate / before.rate for before, after in pairwise(plain) if before.rate > 0]


def committed_per_step(passes: Sequence[BenchPass]) -> float | None:
    """Mean number of tokens that one forward pass of the target adds to an answer (τ); `None` if steps are unknown."""
    answers = [answer for found in passes for answer in found.answers if answer.steps]
    steps = sum(answer.steps for answer in answers)
    return sum(answer.completion_tokens for answer in answers) / steps if steps else None


def acceptance_by_position(passes: Sequence[BenchPass]) -> list[float]:
    """The share of target steps in which at least 1, 2, … drafted tokens were accepted, up to the last non-zero one.

    Steps without a draft count as steps in which nothing was accepted.
    """
    accepted = [arrival.accepted for found in passes for answer in found.answers for arrival in answer.arrivals]
    steps = sum(answer.steps for found in passes for answer in found.answers)
    if not steps:
        return []
    deepest = min(_MOST_POSITIONS, max(accepted, default=0))
    return [sum(count >= depth for count in accepted) / steps for depth in range(1, deepest + 1)]


def first_token_percentiles(passes: Sequence[BenchPass]) -> list[float | None]:
    """TTFT of all answers at each of `QUANTILES`, in seconds."""
    return _percentiles(answer.first_token_seconds for found in passes for answer in found.answers)


def per_token_percentiles(passes: Sequence[BenchPass]) -> list[float | None]:
    """TPOT of all answers at each of `QUANTILES`, in seconds."""
    return _percentiles(answer.seconds_per_token for found in passes for answer in found.answers)


def _percentiles(seconds: Iterable[float | None]) -> list[float | None]:
    known = [value for value in seconds if value is not None]
    return [percentile(known, share) for share in QUANTILES]


def per_committed_token(passes: Sequence[BenchPass]) -> tuple[float, float] | None:
    """Target steps and target token computations per token of the answers; `None` if steps are unknown.

    Prompts are left out. A step computes one token and the drafted ones.
    """
    answers = [answer for found in passes for answer in found.answers if answer.steps]
    tokens = sum(answer.completion_tokens for answer in answers)
    if not tokens:
        return None
    steps, drafted = sum(answer.steps for answer in answers), sum(answer.drafted for answer in answers)
    return steps / tokens, (steps + drafted) / tokens


def draft_flops(cost: Cost, passes: Sequence[BenchPass]) -> float:
    """Floating-point operations of drafting in some passes, without prompts: an estimate, at most too high.

    Where a pass drafts one token, every proposed token counts as a pass. Where a pass drafts all depths, every step of
    a sequence counts as one, but there are not more of them than proposed tokens.
    """
    proposed = sum(found.counters.get("proposed_tokens", 0.0) for found in passes)
    steps = sum(answer.steps for found in passes for answer in found.answers)
    committed = sum(found.tokens for found in passes) if proposed else 0
    by_step = cost.draft_step_flops * min(steps, proposed)
    return cost.draft_flops * proposed + by_step + cost.draft_committed_flops * committed


def accepted_by_origin(passes: Sequence[BenchPass]) -> dict[str, int]:
    """Number of accepted draft tokens by origin; empty if unknown."""
    return summed(answer.accepted_by_origin for found in passes for answer in found.answers)


def drafted_tokens(passes: Sequence[BenchPass]) -> tuple[int, int]:
    """Number of drafted tokens that were verified, and of those that were accepted."""
    answers = [answer for found in passes for answer in found.answers]
    accepted = sum(arrival.accepted for answer in answers for arrival in answer.arrivals)
    return sum(answer.drafted for answer in answers), accepted
