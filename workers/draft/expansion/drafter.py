"""A drafter that grows trees: what it is asked for first, and in between what is likely to be asked for next.

There is one growth, best-first over all sequences: a forward pass expands the likeliest nodes of all of them together.
The modes are filters of it: `serial` expands only what a call waits for, `run_ahead` between calls also what follows
the paths that were sent, `enumerate` anything, the likely corrections of what was sent included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from cluster.core.config import DraftSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.verification import RowFault
from workers.draft.expansion.calibration import Calibration
from workers.draft.expansion.expander import Expander
from workers.draft.expansion.pass_gain import Pace
from workers.draft.expansion.row import Work
from workers.draft.expansion.run_ahead import Frontier
from workers.draft.expansion.session import GrowingSession, Pick
from workers.draft.expansion.settings import ExpansionSettings
from workers.draft.sessions import Sessions
from workers.kv.block_table import BlockTable

MOST_FORWARD_TOKENS = 512
"""Tokens in one forward pass: a long prompt goes in chunks, beside the other rows' guesses."""
LOOKUP_SIZES = range(2, 9)
"""Lengths of the suffixes that are looked up, in tokens."""
_BACKGROUND_NODES = 8
"""Nodes that a pass between calls expands: about as many as cost no more than one."""
_BACKGROUND_TOKENS = 64
"""Committed tokens that go through in a pass between calls: the next call may be waiting already."""
_SPARE = 8
"""Between calls one block in so many stays free."""

_Reserve = Callable[[BlockTable, int], bool]


class GrowingDrafter:
    """Trees from anything that expands nodes.

    Keys and values of guessed tokens stay until the next row tells which of them were committed. When the memory is
    full, sequences that were not asked for lately lose theirs (they are computed again when asked for); a row for
    which that is not enough goes with what could be grown, down to nothing.
    """

    def __init__(
        self,
        expander: Expander,
        settings: ExpansionSettings,
        draft: DraftSection,
        has_lookup: bool = False,
        most_forward_tokens: int = MOST_FORWARD_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
        calibration: Calibration | None = None,
    ) -> None:
        self._expander = expander
        self._memory = expander.memory
        self._width = settings.width
        self._draft = draft
        self._most_forward_tokens = most_forward_tokens
        self._clock = clock
        self._calibration = Calibration() if calibration is None else calibration
        self._pace = Pace()
        self._frontier = Frontier(settings, draft.max_nodes, expander.max_context_len)
        lookups = LOOKUP_SIZES if has_lookup else None
        self._sessions = Sessions(
            lambda start: GrowingSession(start, self._memory, self._calibration, lookups, draft.max_depth),
            GrowingSession.forget,
            expander.vocabulary_size,
        )
        self._calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """See `DraftMethod`."""
        self._calls += 1
        now = self._clock()
        works: dict[SequenceId, Work] = {}
        faults: dict[SequenceId, RowFault] = {}
        for row in rows:
            session = self._sessions.apply(row)
            if isinstance(session, RowFault):
                faults[row.sequence_id] = session
            else:
                session.note_asked(now, self._pace)
                session.tree.look_ahead(self._calls)
                works[row.sequence_id] = Work(session, row, self._draft, self._width, self._expander.max_context_len)
        self._serve(works)
        proposals = tuple(
            Proposal(row.sequence_id, row.base_len, fault=faults[row.sequence_id])
            if row.sequence_id in faults
            else works[row.sequence_id].proposal(self._calls)
            for row in rows
        )
        self._frontier.renew([work.session for work in works.values()])
        return proposals

    def learn(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """See `DraftMethod`."""
        for session in self._sessions.known(sequence_ids):
            told = session.behind(self._expander.max_context_len)
            if told:
                piece = Pick(session, session.tree.root, told[:_BACKGROUND_TOKENS], is_last=False)
                return bool(self._expand([piece], self._reserve_spare))
        return False

    def grow(self) -> bool:
        """See `DraftMethod`."""
        picks = self._frontier.take(_BACKGROUND_NODES, _BACKGROUND_TOKENS)
        if not picks:
            return False
        expanded = self._expand(picks, self._reserve_spare)
        if len(expanded) < len(picks):
            self._frontier.clear()  # there is no room before the next call
        self._frontier.add(expanded)
        return True

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `DraftMethod`."""
        self._sessions.release(sequence_ids)

    def close(self) -> None:
        """See `DraftMethod`."""
        self._frontier.clear()
        self._sessions.clear()

    def _serve(self, works: dict[SequenceId, Work]) -> None:
        """Grow until every budget is served, or what is left to grow is not worth waiting for."""
        others = self._others(works)
        serving = {work.session: work for work in works.values()}
        try:
            for work in works.values():
                self._make_room(work, others)
            while picks := self._plan(list(works.values())):
                expanded = self._expand(picks, lambda table, length: self._reserve(table, length, others))
                for session in {pick.session for pick in picks}.difference(pick.session for pick in expanded):
                    serving[session].give_up()
                for session in {pick.session for pick in expanded if pick.is_last}:
                    serving[session].expanded()
        finally:
            for session in serving:  # room that was made and not used goes back
                self._memory.truncate(session.tree.trunk, session.tree.trunk.stored_len)

    def _make_room(self, work: Work, others: Iterator[GrowingSession]) -> None:
        """For a row's committed tokens and one path; one that cannot have that frees its own for those beside it."""
        end = work.path_end()
        if end and not self._reserve(work.session.tree.trunk, end, others):
            work.session.forget()
            work.give_up()

    def _plan(self, works: Sequence[Work]) -> list[Pick]:
        """The next pass: what is short first, then what is worth it."""
        wanted = [pick for work in works for pick in work.picks(self._calibration)]
        if not any(work.is_short for work in works) and not self._pace.is_worth(
            sum(work.gain for work in works), len(works)
        ):
            return []
        # Few tokens first: a chunk of a long prompt takes the room that the others leave.
        room = self._most_forward_tokens
        picks: list[Pick] = []
        for pick in sorted(wanted, key=lambda pick: len(pick.tokens)):
            if room < 1:
                break
            if len(pick.tokens) > room:
                pick = Pick(pick.session, pick.node, pick.tokens[:room], is_last=False)
            picks.append(pick)
            room -= len(pick.tokens)
        return picks

    def _expand(self, picks: Sequence[Pick], reserve: _Reserve) -> list[Pick]:
        """One forward pass. Returns those of `picks` for which there was room."""
        taken: dict[BlockTable, Pick] = {}
        begun = self._clock()
        try:
            for pick in picks:
                tree = pick.session.tree
                table = tree.table_for(pick.node, taken)
                if reserve(table, table.stored_len + len(pick.tokens)):
                    taken[table] = pick
                else:
                    tree.drop(pick.node, table)
            places = [pick.place(table) for table, pick in taken.items()]
            found = self._expander.expand(places) if places else []
        except BaseException:
            for table, pick in taken.items():
                pick.session.tree.drop(pick.node, table)
            raise
        for (table, pick), guesses in zip(taken.items(), found, strict=True):
            if pick.is_last:
                pick.session.tree.grow(pick.node, table, guesses, self._calls)
        if places and all(len(place.tokens) <= 2 for place in places):
            self._pace.note_pass(self._clock() - begun)
        return list(taken.values())

    def _others(self, in_use: Collection[SequenceId]) -> Iterator[GrowingSession]:
        """Those that must give way to the ones in use, one after another."""
        return (session for session in self._sessions.least_recent(without=in_use) if session.tree.is_stored)

    def _reserve(self, table: BlockTable, length: int, others: Iterator[GrowingSession]) -> bool:
        """Make room for `length` tokens, at the cost of sequences that are not in use."""
        while True:
            try:
                self._memory.reserve(table, length)
            except KvPoolExhausted:
                other = next(others, None)
                if other is None:
                    return False
                other.forget()
            else:
                return True

    def _reserve_spare(self, table: BlockTable, length: int) -> bool:
        """Make room for `length` tokens where there is plenty."""
        if self._memory.blocks_free * _SPARE < self._memory.blocks_total:
            return False
        try:
            self._memory.reserve(table, length)
        except KvPoolExhausted:
            return False
        return True
