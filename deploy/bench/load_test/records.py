"""What a load test records of each request, and the figures of one measurement."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from deploy.bench.contestants.answers import BenchAnswer
from deploy.bench.measuring.measures import QUANTILES, percentile
from deploy.draft_origins import summed


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """The outcome of one request."""

    sent_seconds: float
    """When it was sent, in seconds since the measurement began."""
    answer: BenchAnswer | None = None
    """`None` for a request that failed."""
    prompt_tokens: int = 0
    error: str = ""
    """Why it failed: the status code and what the server said, or the kind of an error."""

    @property
    def figures(self) -> dict[str, float | None]:
        """TTFT, TPOT, mean ITL and end-to-end latency in seconds; `None` where an answer is too short for one.

        TPOT is the time after the first token, per token after the first, as `vllm bench serve` defines it.
        """
        if self.answer is None:
            return dict.fromkeys(FIGURES)
        first, tokens = self.answer.first_token_seconds, self.answer.completion_tokens
        gaps = self.gaps
        return {
            "ttft": first,
            "tpot": (self.answer.seconds - first) / (tokens - 1) if first is not None and tokens > 1 else None,
            "itl": statistics.fmean(gaps) if gaps else None,
            "e2el": self.answer.seconds,
        }

    @property
    def gaps(self) -> tuple[float, ...]:
        """Times between one part of the stream and the next, in seconds. A part may have several tokens."""
        arrivals = () if self.answer is None else self.answer.arrivals
        return tuple(later.seconds - earlier.seconds for earlier, later in pairwise(arrivals))

    def keeps(self, bounds: Mapping[str, float]) -> bool:
        """Whether the request succeeded within all bounds. A figure that it does not have keeps its bound."""
        figures = self.figures
        return self.answer is not None and all((figures[name] or 0.0) <= bound for name, bound in bounds.items())


FIGURES: Mapping[str, str] = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2el": "end-to-end latency (E2E)",
}
"""The figures of a request, by their names in `--goodput`."""


PERCENTILES = {f"p{100 * share:.0f}": share for share in QUANTILES}
"""Percentiles of a figure, by name."""


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """The `mean` and the percentiles of some values; `None` without values."""
    if not values:
        return None
    found = {name: percentile(values, share) or 0.0 for name, share in PERCENTILES.items()}
    return {"mean": statistics.fmean(values), **found}


@dataclass(frozen=True, slots=True)
class Measurement:
    """All requests at one rate and concurrency."""

    request_rate: float
    max_concurrency: int
    """0 for no bound."""
    seconds: float
    """From the first request to the last answer."""
    records: tuple[LoadRecord, ...]
    goodput_bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> tuple[LoadRecord, ...]:
        """The requests that were answered."""
        return tuple(record for record in self.records if record.answer is not None)

    @property
    def errors(self) -> dict[str, int]:
        """Number of failed requests by reason, the most frequent first."""
        return dict(Counter(record.error for record in self.records if record.answer is None).most_common())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the answered prompts."""
        return sum(record.prompt_tokens for record in self.completed)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(record.answer.completion_tokens for record in self.completed if record.answer is not None)

    @property
    def cached_share(self) -> float | None:
        """Share of the prompts' tokens that the server found stored; `None` if it reports no prompt tokens."""
        cached = sum(record.answer.cached_tokens for record in self.completed if record.answer is not None)
        return cached / self.prompt_tokens if self.prompt_tokens else None

    @property
    def most_in_flight(self) -> int:
        """Most requests that were running at the same time."""
        changes: list[tuple[float, int]] = []
        for record in self.completed:
            seconds = 0.0 if record.answer is None else record.answer.seconds
            changes += [(record.sent_seconds, 1), (record.sent_seconds + seconds, -1)]
        running = most = 0
        for _, change in sorted(changes):
            running += change
            most = max(most, running)
        return most

    @property
    def goodput(self) -> float | None:
        """Requests per second that kept all bounds; `None` without bounds."""
        if not self.goodput_bounds:
            return None
        return self.per_second(sum(record.keeps(self.goodput_bounds) for record in self.records))

    @property
    def accepted_share(self) -> float | None:
        """Share of the tokens that are accepted drafts; `None` if the server does not report it."""
        known = [record.answer for record in self.completed if record.answer is not None and record.answer.steps]
        tokens = sum(answer.completion_tokens for answer in known)
        return 1 - sum(answer.steps for answer in known) / tokens if tokens else None

    @property
    def accepted_by_origin(self) -> dict[str, int]:
        """Number of accepted draft tokens by origin; empty if the server does not report it."""
        return summed(record.answer.accepted_by_origin for record in self.completed if record.answer is not None)

    def per_second(self, count: int) -> float:
        """A count divided by the duration; 0 for a measurement that took no time."""
        return count / self.seconds if self.seconds else 0.0

    def latency(self, figure: str) -> dict[str, float] | None:
        """The distribution of one of `FIGURES`, in seconds. That of ITL is over all gaps of all requests."""
        if figure == "itl":
            return distribution([gap for record in self.completed for gap in record.gaps])
        values = [record.figures[figure] for record in self.completed]
        return distribution([value for value in values if value is not None])
