"""Limits of one client: requests and tokens a minute, and answers at a time."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.config.client_limits import ClientLimitsSection
from cluster.core.errors import RateLimited

_MINUTE = 60.0


class Allowance:
    """What may be used a minute. It refills evenly and holds at most one minute's share.

    A use that is known only afterwards may exceed it. Then nothing is left until the excess has refilled.
    """

    __slots__ = ("_at", "_left", "_per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def seconds_until(self, amount: int, now: float) -> float:
        """Return how long to wait until `amount`, or the whole share if that is less, may be used."""
        self._refill(now)
        missing = min(amount, self._per_minute) - self._left
        return max(0.0, missing * _MINUTE / self._per_minute)

    def use(self, amount: int, now: float) -> None:
        """Take `amount`, also more than is left."""
        self._refill(now)
        self._left -= amount

    def _refill(self, now: float) -> None:
        refilled = (now - self._at) * self._per_minute / _MINUTE
        self._left = min(float(self._per_minute), self._left + refilled)
        self._at = now


@dataclass(slots=True)
class ClientUse:
    """What one client uses now, and what it may use."""

    limits: ClientLimitsSection
    requests: Allowance | None
    tokens: Allowance | None
    answers: int = 0
    """Answers that are generated at the moment."""

    @classmethod
    def begin(cls, limits: ClientLimitsSection, now: float) -> ClientUse:
        """Return the use of a client that has used nothing."""
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return cls(
            limits,
            None if requests is None else Allowance(requests, now),
            None if tokens is None else Allowance(tokens, now),
        )

    def enter(self, name: str, answers: int, now: float) -> None:
        """Count a request for `answers` answers. Raises `RateLimited`."""
        most = self.limits.concurrent_answers
        if most is not None and self.answers + answers > most:
            raise RateLimited(f"the client {name} may have {most} answers at a time, and has {self.answers}", 1.0)
        for allowance, amount, unit in ((self.requests, 1, "requests"), (self.tokens, 1, "tokens")):
            seconds = 0.0 if allowance is None else allowance.seconds_until(amount, now)
            if seconds:
                raise RateLimited(f"the client {name} has used its {unit} of this minute", seconds)
        if self.requests is not None:
            self.requests.use(1, now)
        self.answers += answers

    def count(self, tokens: int, now: float) -> None:
        """Count tokens of a prompt or of an answer."""
        if self.tokens is not None:
            self.tokens.use(tokens, now)

    def leave(self, answers: int) -> None:
        """Count that a request has ended."""
        self.answers -= answers
