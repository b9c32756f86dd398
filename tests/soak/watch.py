"""Resident memory over time, and the server's counters."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.wire.generation_client import GenerationClient

SAMPLE_SECONDS = 1.0


@dataclass
class Resident:
    """The resident memory of this process over time."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Sample the memory until cancelled."""
        process, begun = psutil.Process(), time.monotonic()
        while True:
            self.seconds.append(time.monotonic() - begun)
            self.megabytes.append(process.memory_info().rss / 1e6)
            await asyncio.sleep(SAMPLE_SECONDS)

    def growth(self) -> float:
        """MB per hour, fitted to the last two thirds of the run, when caches and pools are full."""
        first = len(self.seconds) // 3
        if len(self.seconds) - first < 2:
            return 0.0
        slope, _ = numpy.polyfit(self.seconds[first:], self.megabytes[first:], 1)
        return float(slope) * 3600


async def rounds_without_drafter(client: GenerationClient) -> float:
    """The number of rounds without drafts because a drafter's call failed or its circuit breaker was open.

    Rounds in which it was only late or busy are left out.
    """
    exposition, _ = await client.metrics()
    (family,) = (
        one for one in text_string_to_metric_families(exposition.decode()) if one.name == "pilotfish:drafter_fallback"
    )
    return sum(one.value for one in family.samples if one.labels.get("reason") in ("failed", "open"))


async def read_counts(client: GenerationClient) -> dict[str, float]:
    """Every metric except histogram buckets, summed over its labels."""
    exposition, _ = await client.metrics()
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                counts[sample.name] = counts.get(sample.name, 0.0) + sample.value
    return counts
