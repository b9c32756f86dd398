"""The port of everything that answers prompts in a benchmark.

A competitor is one entry of the results; its contestant is the running program that answers for it.
"""

from __future__ import annotations

from typing import Protocol

from deploy.bench.contestants.answers import BenchPass, PassRequest


class Contestant(Protocol):
    """Answers prompts and records when each token came."""

    async def answer(self, request: PassRequest) -> BenchPass:
        """Answer all prompts of the request. Raises `PilotfishError`."""
        ...
