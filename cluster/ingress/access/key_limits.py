"""Limits of one client: requests and tokens a minute, and answers at a time."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.config.server import ClientLimitsSection
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

    def is_full(self, now: float) -> bool:
        """Whether nothing counts any more of what was used."""
        self._refill(now)
        return self._left >= self._per_minute

    def changed(self, per_minute: int, now: float) -> Allowance:
        """Return the allowance of another limit, with as much used as of this one."""
        self._refill(now)
        new = Allowance(per_minute, now)
        new._left -= self._per_minute - self._left
        return new

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
        use = cls(limits, None, None)
        use.limit(limits, now)
        return use

    def limit(self, limits: ClientLimitsSection, now: float) -> None:
        """Set other limits. What was used counts on, and so do the answers that are generated."""
        self.limits = limits
        self.requests = _changed(self.requests, limits.requests_per_minute, now)
        self.tokens = _changed(self.tokens, limits.tokens_per_minute, now)

    def is_idle(self, now: float) -> bool:
        """Whether this is the use of a client that has used nothing."""
        shares = (self.requests, self.tokens)
        return not self.answers and all(share is None or share.is_full(now) for share in shares)

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


class ClientUses:
    """The use of each client by name. A client that is idle is forgotten when the next one comes, so the table holds
    only clients that have used something within the last minutes."""

    def __init__(self) -> None:
        self._uses: dict[str, ClientUse] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, name: str, limits: ClientLimitsSection, now: float) -> ClientUse:
        """Return the use of a client, held to `limits` from now on, the same one while it has running requests."""
        use = self._uses.get(name)
        if use is None:
            self._uses = {other: use for other, use in self._uses.items() if not use.is_idle(now)}
            use = self._uses[name] = ClientUse.begin(limits, now)
        elif use.limits != limits:
            use.limit(limits, now)
        return use


def _changed(share: Allowance | None, per_minute: int | None, now: float) -> Allowance | None:
    if per_minute is None:
        return None
    return Allowance(per_minute, now) if share is None else share.changed(per_minute, now)
