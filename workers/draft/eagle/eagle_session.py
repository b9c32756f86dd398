"""One sequence of an EAGLE head: which hidden states wait for their next token, and the last draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.core.drafting import DraftBudget, Evidence, Proposal
from cluster.core.request import SequenceStart
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.modules.context_window import ContextShape
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import CollectedStates
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.draft_node import DraftNode
from workers.draft.common.trees.node_probabilities import observe_decision
from workers.draft.common.trees.pass_cost import CommitTimes

Piece = tuple[int, Tensor]
"""Position of the first row, and taps [tokens, taps, hidden size]."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """The draft after `base_len` tokens."""

    base_len: int
    start: SequenceStart
    budget: DraftBudget
    root: DraftNode
    proposal: Proposal


class EagleSession(ContextSession):
    """Committed tokens and the last draft. A position is computed once the token after it is committed."""

    __slots__ = ("_held", "collected", "commit_times", "grown", "is_streak", "output")

    def __init__(
        self,
        start: SequenceStart,
        shape: ContextShape,
        store: ContextStore,
        device: torch.device,
        version: int = 0,
    ) -> None:
        """`version`: see `SegmentKeys`."""
        super().__init__(start, shape, store, device, lead=1, version=version)
        self._held: Piece | None = None
        """The taps of the last token, whose next token is not committed yet."""
        self.output: tuple[int, Tensor] | None = None
        """The head's last output for committed tokens [hidden size], and its position."""
        self.grown: _Grown | None = None
        self.is_streak = True
        """Whether the last committed token was a first candidate."""
        self.commit_times = CommitTimes()
        self.collected = CollectedStates()

    def forget_draft(self) -> None:
        """Drop the last draft, and the hidden states of tokens that were removed."""
        length = len(self.tokens)
        self.grown = None
        self.collected.forget()
        if self._held is not None and self._held[0] >= length:
            self._held = None
        if self.output is not None and self.output[0] + 1 >= length:
            self.output = None

    def take(self, evidence: Sequence[Evidence], reader: TapReader) -> list[Piece]:
        """The pieces that can go through the head now. Raises `ValueError` for taps of a wrong width."""
        found = [piece for piece in map(reader.read, evidence) if piece is not None]
        pieces: list[Piece] = []
        for first, taps in [*([] if self._held is None else [self._held]), *found]:
            taps = taps[: max(0, len(self.tokens) - first)]
            if pieces and pieces[-1][0] + len(pieces[-1][1]) == first:
                pieces[-1] = (pieces[-1][0], torch.cat([pieces[-1][1], taps]))
            elif len(taps):
                pieces.append((first, taps))
        self._held = None
        ready: list[Piece] = []
        for first, taps in pieces:
            if first + len(taps) == len(self.tokens):
                self._held = (self.anchor, taps[-1:].clone())
                taps = taps[:-1]
            if len(taps):
                ready.append((first, taps))
        return ready

    def set_grown(self, budget: DraftBudget, root: DraftNode, proposal: Proposal) -> None:
        """Store the draft after the present tokens."""
        self.grown = _Grown(len(self.tokens), self.start, budget, root, proposal)

    def observe(self, calibration: Calibration) -> None:
        """Learn from the tokens that were committed since the last draft, once."""
        grown = self.grown
        if grown is None or len(self.tokens) <= grown.base_len:
            return
        self.grown = None
        node: DraftNode | None = grown.root
        for token in self.tokens[grown.base_len :]:
            if node is None or not node.children:
                self.is_streak = False
                return
            child = node.child(token)
            observe_decision(node, child, calibration, self.is_greedy)
            self.is_streak = child is not None and child.rank == 0
            node = child
