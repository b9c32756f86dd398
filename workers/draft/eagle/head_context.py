"""Committed tokens of an EAGLE head: they go through the head with the target's hidden states as soon as these come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from workers.draft.common.modules.pass_of_salt import PassOfSalt
from workers.draft.common.modules.text_collector import TextCollector
from workers.draft.common.sessions import Sessions
from workers.draft.eagle.eagle_session import EagleSession, Piece
from workers.draft.eagle.head_pass import HeadPass, committed_piece
from workers.transfer import onto

SessionType = TypeVar("SessionType", bound=EagleSession)
_Part = tuple[EagleSession, Piece]


class HeadContext(Generic[SessionType]):
    """The sequences of a head, and the pass that brings them up to date."""

    def __init__(self, heads: PassOfSalt[HeadPass], collector: TextCollector, sessions: Sessions[SessionType]) -> None:
        self._heads = heads
        self._collector = collector
        self._sessions = sessions

    def update(
        self, rows: Sequence[DraftRow], proposals: dict[SequenceId, Proposal]
    ) -> list[tuple[DraftRow, SessionType]]:
        """Commit the rows' tokens and run them through the head. Returns the rows that fit, with their sequences.

        `proposals` gets a fault for each other one.
        """
        queues: dict[EagleSession, list[Piece]] = {}

        def take(session: SessionType, row: DraftRow) -> None:
            if row.start is not None:
                session.restore()
            queues[session] = session.take(row.evidence, self._collector.reader)
            self._collector.take(session, row.evidence)

        served = list(self._sessions.update(rows, proposals, take))
        self._catch_up(queues)
        return served

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for these sequences. Unknown ones are no error."""
        self._sessions.release(sequence_ids)

    def _catch_up(self, queues: dict[EagleSession, list[Piece]]) -> None:
        """Run committed tokens through the head, in each pass some of each sequence."""
        most = self._heads.own.context_shape.scratch
        while queues := {session: queue for session, queue in queues.items() if queue}:
            parts: list[_Part] = []
            for session, queue in queues.items():
                first, taps = queue.pop(0)
                dropped = max(0, session.window.oldest - first)  # beyond the window
                first, taps = first + dropped, taps[dropped:]
                if len(taps) > most:
                    queue.insert(0, (first + most, taps[most:]))
                if len(taps):
                    parts.append((session, (first, taps[:most])))
            for head, group in self._heads.groups(parts, lambda part: part[0].start.cache_salt):
                self._run(head, group)

    def _run(self, head: HeadPass, parts: Sequence[_Part]) -> None:
        """Run committed tokens of different sequences through a head."""
        reach = head.context_shape.window
        pieces = [
            committed_piece(session.window, first, session.tokens[first + 1 : first + 1 + len(taps)], reach)
            for session, (first, taps) in parts
        ]
        taken = torch.cat([taps for _, (_, taps) in parts])
        is_fused = self._collector.reader.is_fused
        features = onto(head.device, taken[:, 0]).float() if is_fused else head.features(taken)
        for (session, (first, taps)), output in zip(parts, head.run(features, pieces), strict=True):
            end = first + len(taps)
            session.window.mark(first, end)
            session.share(first, end)
            session.output = (end - 1, output)
