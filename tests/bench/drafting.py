"""Passes through the same prompts by clusters with drafts and without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.client import Answers, ask_all
from tests.bench.processes.clusters import ProcessCluster

SHIPPED = "smollm2-135m-draft"
"""The packaged name of the draft that comes with Pilotfish."""


@dataclass
class Passes:
    """The measurements of one cluster, one per repetition."""

    answers: list[Answers] = field(default_factory=list)
    target_draft_seconds: list[float] = field(default_factory=list)
    """Time in which the target drafted, of each pass."""

    @property
    def committed(self) -> list[float]:
        """Tokens per target step (τ) of each pass."""
        return [answers.committed_per_step for answers in self.answers]

    def equal(self, plain: Passes) -> str:
        """How many answers of all repetitions equal those of plain decoding, as text."""
        pairs = [
            pair
            for mine, theirs in zip(self.answers, plain.answers, strict=True)
            for pair in zip(mine.each, theirs.each, strict=True)
        ]
        return f"{sum(one.tokens == other.tokens for one, other in pairs)} of {len(pairs)}"


def measure(
    cluster: ProcessCluster,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    into: Passes,
    max_draft_tokens: int | None = None,
) -> None:
    """Measure one pass through all prompts, one after another."""
    cluster.target.draft_seconds()
    into.answers.append(asyncio.run(ask_all(cluster.coordinator.address, prompts, tokens, 1, max_draft_tokens)))
    into.target_draft_seconds.append(cluster.target.draft_seconds())


def warm(cluster: ProcessCluster, prompts: Sequence[tuple[int, ...]], tokens: int, batches: Sequence[int]) -> None:
    """Send a few prompts at each batch size, so that everything is compiled and the controller has measured times."""
    for batch in batches:
        asyncio.run(ask_all(cluster.coordinator.address, prompts[: max(2, batch)], tokens, batch))
