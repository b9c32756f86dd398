"""The committed tokens that a drafter stores for each sequence.

They are a cache, because the coordinator has every sequence. A sequence that is dropped, or lost with the process,
causes one `OUT_OF_SYNC` fault. Then the coordinator sends it again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from cluster.core.drafting import ANY_TOKENS, DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.sampling.context import GREEDY_BELOW

Evictable = TypeVar("Evictable")

MOST_SESSIONS = 4096
"""Most sequences. One batch has at most as many rows, so no row of a batch evicts another row of it."""


class Session:
    """One sequence's committed tokens. A drafting method derives a class from it to store more."""

    __slots__ = ("next_tokens", "start", "tokens")

    def __init__(self, start: SequenceStart) -> None:
        self.start = start
        self.tokens: list[int] = []
        self.next_tokens = ANY_TOKENS
        """What the grammar says of the tokens after these."""

    @property
    def is_greedy(self) -> bool:
        """Whether the target decodes this sequence greedily."""
        return self.start.sampling.temperature < GREEDY_BELOW

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """Replace all tokens after the first `known_len` by `new_tokens`."""
        self.tokens[known_len:] = new_tokens


class DraftingSession(Session):
    """A session whose draft depends on its tokens. Tokens that stay the same are neither removed nor added again."""

    __slots__ = ()

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """Replace all tokens after the first `known_len` by `new_tokens`. What stays the same keeps the draft."""
        held = self.tokens[known_len:]
        most = min(len(held), len(new_tokens))
        same = next((index for index in range(most) if held[index] != new_tokens[index]), most)
        if same < len(held):
            self.remove(known_len + same)
            self.forget_draft()
        self.append(new_tokens[same:])

    def remove(self, length: int) -> None:
        """Remove the tokens from position `length` on."""
        del self.tokens[length:]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.tokens.extend(tokens)

    def forget_draft(self) -> None:
        """Drop what was drafted, because a token before it has changed."""


def has_room(reserve: Callable[[], object], evictable: Iterator[Evictable], evict: Callable[[Evictable], None]) -> bool:
    """Reserve memory, and evict one after another while there is too little. Returns whether there is room."""
    while True:
        try:
            reserve()
        except KvPoolExhausted:
            victim = next(evictable, None)
            if victim is None:
                return False
            evict(victim)
        else:
            return True


SessionType = TypeVar("SessionType", bound=Session)


class Sessions(Generic[SessionType]):
    """All sequences of one drafter. Beyond `most`, the least recently used one is evicted."""

    def __init__(
        self,
        create: Callable[[SequenceStart], SessionType],
        discard: Callable[[SessionType], None] = lambda _: None,
        vocabulary_size: int | None = None,
        most: int = MOST_SESSIONS,
    ) -> None:
        self._create = create
        self._discard = discard
        self._vocabulary_size = vocabulary_size
        self._most = most
        self._sessions: OrderedDict[SequenceId, SessionType] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def apply(self, row: DraftRow) -> RowFault | SessionType:
        """Commit the row's new tokens. Returns the session, or a fault when nothing was changed.

        A repeated row changes nothing. A row that arrives after its successor removes the successor's tokens, and the
        next row is then out of sync.
        """
        problem = self._problem(row)
        if problem is not None:
            return RowFault(RowFaultCode.INVALID, problem)
        session = self._sessions.get(row.sequence_id)
        if row.start is not None:
            session = self._open(row.sequence_id, row.start) if session is None else session
            session.start = row.start
        elif session is None or row.known_len > len(session.tokens):
            held = 0 if session is None else len(session.tokens)
            return RowFault(RowFaultCode.OUT_OF_SYNC, f"{held} tokens are stored, not {row.known_len}", held)
        session.replace(row.known_len, row.new_tokens)
        session.next_tokens = row.next_tokens.below(self._vocabulary_size)
        self._sessions.move_to_end(row.sequence_id)
        return session

    def update(
        self,
        rows: Sequence[DraftRow],
        proposals: dict[SequenceId, Proposal],
        take: Callable[[SessionType, DraftRow], None] = lambda *_: None,
    ) -> Iterator[tuple[DraftRow, SessionType]]:
        """Commit the rows' new tokens, and `take` their evidence. Yields each row that fits, with its session.

        `proposals` gets a fault for each other row. `take` raises `ValueError` for evidence of a wrong form.
        """
        for row in rows:
            session = self.apply(row)
            if isinstance(session, RowFault):
                proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len, fault=session)
                continue
            try:
                take(session, row)
            except ValueError as error:
                fault = RowFault(RowFaultCode.INVALID, f"evidence: {error}")
                proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len, fault=fault)
            else:
                yield row, session

    def least_recent(self, without: Collection[SequenceId] = ()) -> Iterator[SessionType]:
        """Sessions except those of the ids in `without`, the least recently used first."""
        return (session for sequence_id, session in self._sessions.items() if sequence_id not in without)

    def known(self, sequence_ids: Iterable[SequenceId]) -> Iterator[SessionType]:
        """Sessions of those sequences that are stored."""
        return (self._sessions[sequence_id] for sequence_id in sequence_ids if sequence_id in self._sessions)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop the sequences. Unknown sequences are no error."""
        for sequence_id in sequence_ids:
            session = self._sessions.pop(sequence_id, None)
            if session is not None:
                self._discard(session)

    def _open(self, sequence_id: SequenceId, start: SequenceStart) -> SessionType:
        while len(self._sessions) >= self._most:
            self.release([next(iter(self._sessions))])
        session = self._sessions[sequence_id] = self._create(start)
        return session

    def _problem(self, row: DraftRow) -> str | None:
        """The reason why this row can never be served; `None` if it can."""
        if row.known_len < 0 or row.base_len < 1:
            return f"base_len: {row.base_len} must be at least 1 and the number of new_tokens ({len(row.new_tokens)})"
        if row.start is not None and row.known_len:
            return f"new_tokens: {len(row.new_tokens)} must be the whole sequence ({row.base_len}) where start is set"
        if row.start is not None and not 1 <= row.start.prompt_len <= _longest_prompt(row):
            return f"start.prompt_len: {row.start.prompt_len} must be between 1 and base_len ({row.base_len})"
        if self._vocabulary_size is not None and row.new_tokens and max(row.new_tokens) >= self._vocabulary_size:
            return f"new_tokens: {max(row.new_tokens)} must be below the vocabulary size {self._vocabulary_size}"
        return None


def _longest_prompt(row: DraftRow) -> float:
    """The largest `prompt_len`: a row without a budget may bring the first part of a prompt."""
    return row.base_len if row.budget.max_nodes else math.inf
