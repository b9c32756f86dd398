"""What happens to the messages of a simulated network: delays, losses, duplicates and reordering."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deploy.simulation.virtual_time import now


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one message."""

    delay: float
    """Seconds until it arrives."""
    is_lost: bool = False
    is_reset: bool = False
    """Whether the loss breaks the connection at once, so that the caller notices."""
    copies: int = 1
    overtakes: bool = False
    """Whether it may arrive before earlier messages of the same connection."""


class Weather:
    """Decides the fate of messages. This one delays all by a constant."""

    def __init__(self, seconds: float) -> None:
        self._fate = Fate(seconds)

    def fate(self, source: str, destination: str) -> Fate:  # noqa: ARG002 - others depend on the ends
        """The fate of the next message between two processes."""
        return self._fate


@dataclass(frozen=True, slots=True)
class FaultWindow:
    """A time in which messages between some processes are disturbed."""

    kind: str
    """`loss`, `delay`, `duplicate` or `reorder`."""
    begin: float
    end: float
    share: float
    """Share of the messages that are disturbed."""
    seconds: float = 0.05
    """Mean or largest extra delay."""
    prefix: str = ""
    """Only messages from or to processes whose name begins so."""

    def matches(self, source: str, destination: str) -> bool:
        """Whether a message between two processes is in question."""
        return source.startswith(self.prefix) or destination.startswith(self.prefix)


class FaultyWeather(Weather):
    """Random faults in windows of time, drawn in the order of the messages."""

    def __init__(self, rng: random.Random, seconds: float, windows: tuple[FaultWindow, ...]) -> None:
        super().__init__(seconds)
        self._rng = rng
        self._seconds = seconds
        self._windows = windows
        self.counts = {"lost": 0, "delayed": 0, "duplicated": 0, "reordered": 0}
        """Number of messages by fault."""

    def fate(self, source: str, destination: str) -> Fate:
        at, rng = now(), self._rng
        delay = self._seconds * (0.5 + rng.random())
        for window in self._windows:
            if not window.begin <= at < window.end or not window.matches(source, destination):
                continue
            if rng.random() >= window.share:
                continue
            match window.kind:
                case "loss":
                    self.counts["lost"] += 1
                    return Fate(delay, is_lost=True, is_reset=rng.random() < 0.5)
                case "delay":
                    self.counts["delayed"] += 1
                    return Fate(delay + rng.expovariate(1 / window.seconds))
                case "duplicate":
                    self.counts["duplicated"] += 1
                    return Fate(delay, copies=2)
                case "reorder":
                    self.counts["reordered"] += 1
                    return Fate(delay + rng.random() * window.seconds, overtakes=True)
        return Fate(delay)
