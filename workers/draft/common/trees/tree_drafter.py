"""A drafter that expands draft trees: within a call for its rows, between calls for the likely next rows.

Expansion is best-first over all sequences: one forward pass expands the most probable nodes of all trees together. The
modes filter it. `serial` expands only within calls, `run_ahead` between calls also below the proposed paths,
`enumerate` between calls anywhere, so that likely corrections of a proposal are covered too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import ANY_TOKENS, DraftRow, Proposal
from cluster.core.errors import KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.ports import SourceStates
from workers.draft.common.sessions import Sessions, has_room
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.expander import Expander, ReadsSources
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.pass_cost import PassCost
from workers.draft.common.trees.proposal_builder import ProposalBuilder
from workers.draft.common.trees.run_ahead import RunAheadQueue
from workers.draft.common.trees.tree_session import NodeExpansion, TreeSession
from workers.kv.block_table import BlockTable

MOST_FORWARD_TOKENS = 512
"""Most tokens in one forward pass. A long prompt goes in chunks, beside the tokens of other rows."""
LOOKUP_SIZES = range(2, 9)
"""Lengths of the suffixes that are looked up, in tokens."""
_BACKGROUND_NODES = 8
"""Most nodes that one pass between calls expands. Up to about this number, a pass takes as long as for one node."""
_BACKGROUND_TOKENS = 64
"""Most committed tokens in one pass between calls, so that the next call does not wait long."""
_SPARE = 8
"""Passes between calls leave at least one block in this many free."""

_Reserve = Callable[[BlockTable, int], bool]


class TreeDrafter:
    """Proposes draft trees over any expander. It is a `DraftMethod` with `IdleWork`.

    Keys and values of drafted tokens stay stored until the sequence's next row shows which tokens were committed. When
    the memory is full, the least recently used sequences are evicted, and their keys and values are computed again
    when they are needed. If there is still too little room for a row, its proposal comes from the tree as it is, which
    may be empty.
    """

    def __init__(
        self,
        expander: Expander,
        settings: ExpansionSettings,
        draft: DraftSection,
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
        self._cost = PassCost()
        self._queue = RunAheadQueue(settings, draft.max_nodes, expander.max_context_len)
        lookup_sizes = LOOKUP_SIZES if settings.has_lookup else None
        self._sessions = Sessions(
            lambda start: TreeSession(start, self._memory, self._calibration, lookup_sizes, draft.max_depth),
            self._discard,
            expander.vocabulary_size,
        )
        self._calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self._calls += 1
        now = self._clock()
        builders: dict[SequenceId, ProposalBuilder] = {}
        proposals: dict[SequenceId, Proposal] = {}
        for row, session in self._sessions.update(rows, proposals):
            self._prepare(session)
            session.commit_times.record(len(session.tokens), now, self._cost)
            if session.next_tokens != ANY_TOKENS:  # one that was received is another object
                session.tree.restrict(session.next_tokens, self._calls)
            session.tree.extend_by_lookup(self._calls)
            max_context_len = self._expander.max_context_len
            builders[row.sequence_id] = ProposalBuilder(session, row, self._draft, self._width, max_context_len)
        self._expand_for(builders)
        proposals |= {sequence_id: builder.build(self._calls) for sequence_id, builder in builders.items()}
        self._queue.renew([builder.session for builder in builders.values()])
        return tuple(proposals[row.sequence_id] for row in rows)

    def read_sources_from(self, states: SourceStates) -> None:
        """Use the output of the target's encoder instead of reading sources, if the encoder is the same."""
        if isinstance(self._expander, ReadsSources):
            self._expander.read_sources_from(states)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._sessions.release(sequence_ids)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Compute some committed tokens of these sequences. Returns false when none are left or there is no room."""
        for session in self._sessions.known(sequence_ids):
            unstored = session.catch_up_tokens(self._expander.max_context_len)
            if unstored and not self._lacks_source(session):
                root = session.tree.root
                piece = NodeExpansion(session, root, unstored[:_BACKGROUND_TOKENS], is_last=False)
                return bool(self._run_pass([piece], self._reserve_spare))
        return False

    def run_ahead(self) -> bool:
        """Do one piece of work that makes the next proposals ready sooner. Returns false when there is none."""
        planned = self._queue.take(_BACKGROUND_NODES, _BACKGROUND_TOKENS)
        if not planned:
            return False
        planned = [expansion for expansion in planned if not self._lacks_source(expansion.session)]
        expanded = self._run_pass(planned, self._reserve_spare)
        if len(expanded) < len(planned):
            self._queue.clear()  # there is no room before the next call
        self._queue.add_below(expanded)
        return True

    def _prepare(self, session: TreeSession) -> None:
        """Called for each row of a call, once its tokens are committed and before anything is drafted for it."""

    def _discard(self, session: TreeSession) -> None:
        """Free what is stored for a sequence that ends."""
        session.evict()

    def _expand_for(self, builders: dict[SequenceId, ProposalBuilder]) -> None:
        """Run passes until every budget is used up, or another pass is not worth its time."""
        evictable = self._evictable(builders)
        by_session = {builder.session: builder for builder in builders.values()}
        try:
            for builder in builders.values():
                self._make_room(builder, evictable)
            while planned := self._plan_pass(list(builders.values())):
                expanded = self._run_pass(planned, lambda table, length: self._reserve(table, length, evictable))
                done = {expansion.session for expansion in expanded}
                for session in {expansion.session for expansion in planned} - done:
                    by_session[session].stop()
                for session in {expansion.session for expansion in expanded if expansion.is_last}:
                    by_session[session].count_pass()
        finally:
            for session in by_session:  # free what was reserved and not used
                self._memory.truncate(session.tree.root_table, session.tree.root_table.stored_len)

    def _make_room(self, builder: ProposalBuilder, evictable: Iterator[TreeSession]) -> None:
        """Reserve blocks for a row's source, committed tokens and first path, or evict the row where that fails."""
        length, session = builder.first_path_len(), builder.session
        if length and not (
            self._open_source(session, evictable) and self._reserve(session.tree.root_table, length, evictable)
        ):
            session.evict()
            builder.stop()

    def _lacks_source(self, session: TreeSession) -> bool:
        """Whether the model must read the session's source before anything else."""
        return isinstance(self._expander, ReadsSources) and bool(session.start.source) and session.source is None

    def _open_source(self, session: TreeSession, evictable: Iterator[TreeSession]) -> bool:
        """Make room for a session's source, if its model has an encoder. Returns whether there is room."""
        if session.source is not None or not isinstance(self._expander, ReadsSources):
            return True
        expander = self._expander

        def open_source() -> None:
            session.source = expander.open_source(session.start)

        return has_room(open_source, evictable, TreeSession.evict)

    def _plan_pass(self, builders: Sequence[ProposalBuilder]) -> list[NodeExpansion]:
        """Choose the expansions of the next pass; none if no tree is short and the gain is too small."""
        wanted = [expansion for builder in builders for expansion in builder.choose()]
        gain = sum(builder.gain for builder in builders)
        if not any(builder.is_short for builder in builders) and not self._cost.is_worthwhile(gain, len(builders)):
            return []
        # Short rows first: a chunk of a long prompt takes the room that the others leave.
        room = self._most_forward_tokens
        planned: list[NodeExpansion] = []
        for expansion in sorted(wanted, key=lambda expansion: len(expansion.tokens)):
            if room < 1:
                break
            if len(expansion.tokens) > room:
                chunk = expansion.tokens[:room]
                expansion = NodeExpansion(expansion.session, expansion.node, chunk, is_last=False)
            planned.append(expansion)
            room -= len(expansion.tokens)
        return planned

    def _run_pass(self, planned: Sequence[NodeExpansion], reserve: _Reserve) -> list[NodeExpansion]:
        """Run one forward pass. Returns the expansions for which there was room."""
        by_table: dict[BlockTable, NodeExpansion] = {}
        begun = self._clock()
        try:
            for expansion in planned:
                tree = expansion.session.tree
                table = tree.table_for(expansion.node, by_table)
                if reserve(table, table.stored_len + len(expansion.tokens)):
                    by_table[table] = expansion
                else:
                    tree.discard(expansion.node, table)
            rows = [expansion.row(table) for table, expansion in by_table.items()]
            found = self._expander.expand(rows) if rows else []
        except BaseException:
            for table, expansion in by_table.items():
                expansion.session.tree.discard(expansion.node, table)
            raise
        for (table, expansion), candidates in zip(by_table.items(), found, strict=True):
            if expansion.is_last:
                expansion.session.tree.expand(expansion.node, table, candidates, self._calls)
        if rows and all(len(row.tokens) <= 2 for row in rows):
            self._cost.record_pass(self._clock() - begun)
        return list(by_table.values())

    def _evictable(self, in_use: Collection[SequenceId]) -> Iterator[TreeSession]:
        """Sessions that hold blocks and are not in use, the least recently used first."""
        return (session for session in self._sessions.least_recent(without=in_use) if session.tree.holds_blocks)

    def _reserve(self, table: BlockTable, length: int, evictable: Iterator[TreeSession]) -> bool:
        """Make room for `length` tokens, evicting sessions if need be. Returns whether there is room."""
        return has_room(lambda: self._memory.reserve(table, length), evictable, TreeSession.evict)

    def _reserve_spare(self, table: BlockTable, length: int) -> bool:
        """Make room for `length` tokens if enough blocks are free without eviction. Returns whether there is room."""
        if self._memory.blocks_free * _SPARE < self._memory.blocks_total:
            return False
        try:
            self._memory.reserve(table, length)
        except KvPoolExhausted:
            return False
        return True
