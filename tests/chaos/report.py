"""The result of a run: faults by role, streams, differences, leaks, and pauses, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.chaos.streams import StreamResults


@dataclass
class ChaosReport:
    """Everything that a run shows."""

    seed: int
    seconds: float
    faults: dict[str, dict[str, int]]
    """Number of faults by role and kind."""
    streams: StreamResults
    preemptions: int
    leaks: list[str]
    """What was not back at its start, one line each."""
    messages: dict[str, int] = field(default_factory=dict)
    """Number of disturbed messages by kind."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Number of replaced processes by role."""
    replacement_seconds: dict[str, float] = field(default_factory=dict)
    """Times from the notice of a loss until its replacement serves."""

    @property
    def kills(self) -> int:
        """Number of processes that were killed or frozen for ever."""
        return sum(count for of_role in self.faults.values() for kind, count in of_role.items() if kind != "paused")

    @property
    def is_clean(self) -> bool:
        """Whether no token differed, no stream ended with an error, and nothing leaked."""
        return not self.streams.differences and not self.leaks and not self.streams.errors

    def to_json(self) -> str:
        """The report as one line of JSON."""
        streams = asdict(self.streams) | {"pauses": percentiles(self.streams.pauses)}
        return json.dumps(asdict(self) | {"streams": streams, "kills": self.kills, "is_clean": self.is_clean})

    def to_text(self) -> str:
        """The report for a reader."""
        streams = self.streams
        roles = [
            f"  {role}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            for role, kinds in sorted(self.faults.items())
        ]
        return "\n".join(
            [
                *streams.shown,
                f"seed {self.seed}, {self.seconds:.0f} s: {self.kills} processes killed or frozen",
                *roles,
                *self._replacements(),
                f"messages: {_counts(self.messages) or 'undisturbed'}",
                f"streams: {streams.complete} complete, {streams.left} left by their client, {streams.resumed} times "
                f"resumed; {streams.tokens} tokens, {self.preemptions} preemptions",
                f"streams with other tokens: {streams.differences} (by rounding alone: {streams.near})",
                f"streams that ended with an error: {_counts(streams.errors) or '0'}",
                f"longest pause of a stream: {_times(percentiles(streams.pauses))}",
                f"leaks: {'; '.join(self.leaks) or '0'}",
                "passed" if self.is_clean else "FAILED",
            ]
        )

    def _replacements(self) -> list[str]:
        """A line on the replaced processes, if they were counted."""
        if not self.replaced:
            return []
        times = _times(self.replacement_seconds)
        return [f"processes replaced: {_counts(self.replaced)}; a replacement takes {times}"]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum, rounded to milliseconds."""
    ordered = sorted(values) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in shares.items()}


def by_role(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Counts by role, then by kind."""
    nested: dict[str, dict[str, int]] = {}
    for (role, kind), count in counts.items():
        nested.setdefault(role, {})[kind] = count
    return nested


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _times(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
