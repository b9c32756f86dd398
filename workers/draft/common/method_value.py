"""What one method of a combination is worth: the tokens that it adds, against the time that its proposals take.

A method that costs more than it adds is suspended and tried again later. The tries together take a small share of the
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.drafting import DraftRow
from cluster.core.evidence_store import EvidenceStore
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.common.sessions import MOST_SESSIONS

LOSS_SHARE = 0.02
"""Largest share of the time that is lost by trying a method that costs time."""
FREE_SHARE = 0.02
"""A method whose proposals take less than this share of the time is never suspended."""
FREE_SECONDS = 0.0002
"""A method whose proposals take less time than this, in seconds, is never suspended."""
FIRST_PAUSE_SECONDS = 1.0
"""Shortest first suspension, in seconds. It doubles while the method costs time."""
MAX_PAUSE_SECONDS = 64.0
"""Bound of that doubling, in seconds."""
LEAD_SECONDS = 0.25
"""Time before a suspension ends from which on the method's evidence is kept, so that it has a context, in seconds."""
_DECAY = 1 - 1 / 64
"""Factor on the sums with each further proposal."""
_SURE_PROPOSALS = 24
"""Number of judged proposals after which a method is suspended if it has cost more than it added."""
_CLEAR_PROPOSALS = 8
"""Number of judged proposals after which a clear loss suspends a method."""
_CLEAR_LOSS = 0.6
"""A method that adds less than this share of what it costs is a clear loss."""
_LONGEST_SECONDS = 2.0
"""A longer time between two rounds means that nothing was decoded; it is not counted."""


class RoundRate:
    """How many tokens all sequences together gain in a second. All times are in seconds."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_at = float("-inf")

    def observe(self, tokens: int, now: float) -> float:
        """Record the tokens committed since the last call. Returns the time since then; 0 if it is not counted."""
        elapsed, self._last_at = now - self._last_at, now
        if not tokens or elapsed > _LONGEST_SECONDS:
            return 0.0
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + elapsed
        return elapsed

    def seconds_for(self, tokens: float) -> float:
        """The time in which that many tokens are gained at present; 0 while nothing is known."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class MethodValue:
    """Measures one method, and decides when it is suspended."""

    def __init__(self) -> None:
        self._gained = 0.0
        self._cost = 0.0
        self._calls = 0.0
        self._elapsed = 0.0
        self._judged = 0
        self._resumes_at: float | None = None
        self._next_pause = FIRST_PAUSE_SECONDS

    @property
    def is_suspended(self) -> bool:
        """Whether the method is not asked at present."""
        return self._resumes_at is not None

    def needs_evidence(self, now: float) -> bool:
        """Whether the method needs what the target shows: it is asked, or it will be soon."""
        return self._resumes_at is None or now >= self._resumes_at - LEAD_SECONDS

    def record_call(self, seconds: float) -> None:
        """Record how long the method took to propose for all rows."""
        self._cost = self._cost * _DECAY + seconds
        self._calls = self._calls * _DECAY + 1.0

    def judge(self, gained: float, proposals: int, elapsed: float, rate: RoundRate, now: float) -> None:
        """Record `gained`, the accepted tokens that no other method had proposed, and suspend or resume the method.

        `proposals` is the number of proposals that they come from, and `elapsed` the time of the round.
        """
        if self._resumes_at is not None:
            if now >= self._resumes_at:
                self._resumes_at = None
            return
        self._gained = self._gained * _DECAY + gained
        self._elapsed = self._elapsed * _DECAY + elapsed
        self._judged += proposals
        free = max(FREE_SHARE * self._elapsed, FREE_SECONDS * self._calls)
        if self._judged < _CLEAR_PROPOSALS or not self._elapsed or self._cost < free:
            return
        value = rate.seconds_for(self._gained)
        if value >= self._cost:
            if self._judged >= _SURE_PROPOSALS:
                self._next_pause = FIRST_PAUSE_SECONDS
        elif self._judged >= _SURE_PROPOSALS or value < _CLEAR_LOSS * self._cost:
            self._suspend(now, self._cost - value)

    def _suspend(self, now: float, lost_seconds: float) -> None:
        self._resumes_at = now + max(self._next_pause, lost_seconds / LOSS_SHARE)
        self._next_pause = min(2 * self._next_pause, MAX_PAUSE_SECONDS)
        self._gained = self._cost = self._calls = self._elapsed = 0.0
        self._judged = 0


class MissedRows:
    """The rows that a suspended method was not asked for, so that it can be asked again without a fault."""

    def __init__(self) -> None:
        self._missed: dict[SequenceId, _Missed] = {}
        self._evidence = EvidenceStore()

    def add(self, rows: Sequence[DraftRow]) -> None:
        """Keep the rows' tokens, and the latest evidence."""
        for row in rows:
            missed = self._missed.get(row.sequence_id)
            if missed is None or not missed.takes(row):
                self.release([row.sequence_id])
                self._missed[row.sequence_id] = _Missed(row)
                if len(self._missed) > MOST_SESSIONS:
                    self.release([next(iter(self._missed))])
            else:
                missed.extend(row)
                self._missed[row.sequence_id] = self._missed.pop(row.sequence_id)  # the latest one is last
            self._keep_evidence(row)

    def with_missed(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        """The rows with all tokens since the method's last one, which are no longer kept here."""
        found: list[DraftRow] = []
        for row in rows:
            missed = self._missed.pop(row.sequence_id, None)
            if missed is None or not missed.takes(row):
                self._evidence.take(row.sequence_id)
                found.append(row)
                continue
            missed.extend(row)
            self._keep_evidence(row)
            evidence = self._evidence.take(row.sequence_id)
            found.append(replace(row, new_tokens=tuple(missed.tokens), start=missed.start, evidence=evidence))
        return found

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is kept of the sequences."""
        for sequence_id in sequence_ids:
            self._missed.pop(sequence_id, None)
            self._evidence.take(sequence_id)

    def _keep_evidence(self, row: DraftRow) -> None:
        for evidence in row.evidence:
            self._evidence.add(row.sequence_id, evidence)


class _Missed:
    """The tokens of consecutive rows of one sequence, joined."""

    __slots__ = ("known_len", "start", "tokens")

    def __init__(self, row: DraftRow) -> None:
        self.known_len = row.known_len
        self.start: SequenceStart | None = row.start
        self.tokens = list(row.new_tokens)

    def takes(self, row: DraftRow) -> bool:
        """Whether the row continues or replaces tokens that are here, and not those before them."""
        return row.start is None and self.known_len <= row.known_len <= self.known_len + len(self.tokens)

    def extend(self, row: DraftRow) -> None:
        """Replace the tokens after the row's known ones by its new ones."""
        self.tokens[row.known_len - self.known_len :] = row.new_tokens
