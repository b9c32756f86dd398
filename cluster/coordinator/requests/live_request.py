"""One live request: its sequences, and the queue of its commits to the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from cluster.coordinator.requests.decoding_strategy import DecodingStrategy
from cluster.coordinator.requests.delivery import Delivery, EmittedTokens, Inbox
from cluster.coordinator.requests.live_sequence import LiveSequence
from cluster.core.errors import PilotfishError
from cluster.core.ids import RequestId, SequenceId
from cluster.core.request import Commit, GenerationRequest, Timing, Usage


class LiveRequest:
    """A request from admission to its last commit. Only its own methods change it.

    The inbox of the reader needs no bound of its own: an answer has at most `max_tokens`.
    """

    __slots__ = (
        "_deadline_timer",
        "_delivery",
        "_first_at",
        "_in_slot",
        "_inbox",
        "_latest_at",
        "_longest_answer",
        "_running_at",
        "_sequences",
        "_token_count",
        "_undelivered",
        "_unfinished",
        "arrival",
        "arrived_at",
        "request",
        "strategy",
    )

    def __init__(
        self,
        request: GenerationRequest,
        strategy: DecodingStrategy,
        arrival: int,
        arrived_at: float,
        delivery: Delivery,
    ) -> None:
        """`delivery` serves all readers of a coordinator."""
        self._delivery = delivery
        self.request = request
        self.strategy = strategy
        self.arrival = arrival
        """Order of arrival of its slot 0; the other slots follow."""
        self.arrived_at = arrived_at
        """Time of arrival on the coordinator's clock, in seconds."""
        self._in_slot: dict[int, LiveSequence] = {}
        self._sequences: dict[SequenceId, LiveSequence] = {}
        self._unfinished = set(strategy.answers)
        self._token_count = 0
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._running_at: float | None = None
        self._first_at: float | None = None
        self._latest_at: dict[int, float] = {}
        self._longest_answer = 0
        self._inbox = Inbox(is_patient=not request.streams and not request.stopping.stop_strings)
        self._undelivered = len(strategy.answers)

    @property
    def id(self) -> RequestId:
        """The request's id."""
        return self.request.request_id

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The indices of the answers that had no commit with `finish` yet, ascending."""
        return tuple(sorted(self._unfinished))

    @property
    def token_count(self) -> int:
        """Number of emitted tokens of all answers together."""
        return self._token_count

    @property
    def longest_answer(self) -> int:
        """Number of tokens of the longest answer that has ended."""
        return self._longest_answer

    @property
    def has_run(self) -> bool:
        """Whether one of its sequences ran."""
        return self._running_at is not None

    def mark_running(self, now: float) -> None:
        """Record that one of its sequences runs. Only the first time counts."""
        if self._running_at is None:
            self._running_at = now

    def timing(self, now: float) -> Timing:
        """Return how long the phases of an answer took that ends now."""
        running_at = now if self._running_at is None else self._running_at
        first_at = now if self._first_at is None else self._first_at
        return Timing(running_at - self.arrived_at, first_at - running_at, now - first_at)

    # --- its sequences ---

    @property
    def sequences(self) -> Collection[LiveSequence]:
        """The sequences that wait, run, or have finished while others may still share their KV."""
        return self._sequences.values()

    def owns(self, live: LiveSequence) -> bool:
        """Whether the sequence is one of this request's."""
        return self._sequences.get(live.id) is live

    def in_slot(self, slot: int) -> LiveSequence | None:
        """The sequence that has a slot now."""
        return self._in_slot.get(slot)

    def writer(self, answer: int) -> LiveSequence | None:
        """The sequence that writes an answer, if it has started."""
        return next((live for live in self._in_slot.values() if live.answer == answer), None)

    def add(self, live: LiveSequence) -> None:
        """Add a new sequence to its slot."""
        self._sequences[live.id] = live
        self._in_slot[live.slot] = live

    def drop(self, live: LiveSequence) -> None:
        """Remove a finished sequence whose KV no other sequence can share."""
        del self._sequences[live.id]

    def mark_forked(self) -> None:
        """Record that sequences that start after this commit will not share the KV of the present ones."""
        for live in self._in_slot.values():
            live.mark_forked()

    def usage(self, answer: int) -> Usage:
        """Return the token and step counts of an answer so far."""
        live = self.writer(answer)
        return Usage(len(self.request.input)) if live is None else live.sequence.usage()

    # --- its reader ---

    def set_deadline_timer(self, timer: asyncio.TimerHandle) -> None:
        """Store the timer that ends the request at its deadline."""
        self._deadline_timer = timer

    def close(self) -> None:
        """Drop the sequences and cancel the timer of the deadline."""
        self._sequences.clear()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()

    def emit(self, commit: Commit, now: float) -> EmittedTokens | None:
        """Hand one commit to the reader. Returns the times of its tokens, if it has any."""
        if commit.finish is not None:
            self._unfinished.discard(commit.index)
            if commit.usage is not None:
                self._longest_answer = max(self._longest_answer, commit.usage.completion_tokens)
        if self._first_at is None and commit.tokens:
            self._first_at = now
            commit = replace(commit, queue_seconds=self.timing(now).queue)
        self._delivery.give(self._inbox, commit)
        if not commit.tokens:
            return None
        since_arrival = None if self._latest_at else now - self.arrived_at
        latest = self._latest_at.get(commit.index)
        self._latest_at[commit.index] = now
        self._token_count += len(commit.tokens)
        return EmittedTokens(len(commit.tokens), since_arrival, None if latest is None else now - latest)

    def fail(self, error: PilotfishError) -> None:
        """End the reader's stream with an error, after what was emitted before."""
        self._delivery.give(self._inbox, error)

    @property
    def is_delivered(self) -> bool:
        """Whether the reader has received the last commit of every answer."""
        return not self._undelivered

    async def receive(self) -> Commit:
        """Wait for the reader's next commit, in order. Raises the error of `fail`."""
        item = await self._inbox.get()
        if isinstance(item, PilotfishError):
            raise item
        self._undelivered -= item.finish is not None
        return item
