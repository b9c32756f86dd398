"""The port of everything that takes part in a race."""

from __future__ import annotations

from typing import Protocol

from deploy.race.answers import PassRequest, RacePass


class Contestant(Protocol):
    """Answers prompts and records when each token came."""

    async def answer(self, request: PassRequest) -> RacePass:
        """Answer all prompts of the request. Raises `PilotfishError`."""
        ...
