"""What each client holds on a worker, until the client releases it or has been silent for too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cluster.core.ids import SequenceId

LEASE_SECONDS = 60.0
"""Default silence after which a client counts as gone, in seconds. One that comes back sends its tokens again."""


class Leases:
    """The sequences of every client. A client with a call under way is not silent."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._held: dict[str, set[SequenceId]] = {}
        self._heard_at: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    @contextmanager
    def call(self, client: str, sequence_ids: Iterable[SequenceId]) -> Iterator[None]:
        """Note a call of a client from its beginning to its end. Afterwards the client holds the sequences."""
        self._held.setdefault(client, set()).update(sequence_ids)
        self._calls[client] = self._calls.get(client, 0) + 1
        try:
            yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]
            self._heard_at[client] = self._clock()

    def release(self, client: str, sequence_ids: Iterable[SequenceId]) -> None:
        """Note that a client has released sequences."""
        held = self._held.get(client, set())
        held.difference_update(sequence_ids)
        if not held:
            self._held.pop(client, None)
            self._heard_at.pop(client, None)

    def take_expired(self) -> list[SequenceId]:
        """Return, once, the sequences of the clients that have been silent for longer than the lease."""
        now = self._clock()
        silent = [
            client
            for client, heard_at in self._heard_at.items()
            if client not in self._calls and now - heard_at > self._seconds
        ]
        expired: list[SequenceId] = []
        for client in silent:
            del self._heard_at[client]
            expired += sorted(self._held.pop(client, ()))
        return expired
