"""Drafts with an EAGLE head: committed tokens catch up with the target's hidden states, then a tree is expanded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.modules.context_window import ContextShape
from workers.draft.common.modules.module_settings import ContextModuleSettings
from workers.draft.common.modules.served_module import computed_type, load_served_module
from workers.draft.common.modules.shortlist import Shortlist
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.sessions import Sessions
from workers.draft.common.trees.calibration import KINDS, Calibration
from workers.draft.common.trees.pass_cost import PassCost
from workers.draft.eagle.eagle_growth import EagleGrowth, GrowthLimits
from workers.draft.eagle.eagle_pass import EaglePass, EaglePiece, committed_piece
from workers.draft.eagle.eagle_session import EagleSession, Piece
from workers.draft.eagle.feature_pass import FeaturePass
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.public import PublicModule

_LEAST_SCRATCH = 64
"""Least number of committed tokens of one sequence that go through the head in one pass."""


class HeadPass(Protocol):
    """The passes of a head; `EaglePass` says what they compute."""

    vocabulary_size: int
    device: torch.device
    context_shape: ContextShape

    def features(self, taps: Tensor) -> Tensor:
        """Features [tokens, hidden size] of taps [tokens, taps, target's hidden size]."""
        ...

    def run(self, features: Tensor, pieces: Sequence[EaglePiece]) -> Tensor:
        """Write the keys and values of all pieces. Returns the wanted outputs [wanted, hidden size]."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] of outputs [rows, hidden size]."""
        ...


class EagleTreeDrafter:
    """Drafts trees with one pass for each depth. It is a `DraftMethod`.

    A sequence whose hidden states at the last position but one are unknown gets no draft. Other unknown positions are
    not attended to.
    """

    def __init__(
        self,
        head: HeadPass,
        shortlist: Shortlist,
        taps: TapReader,
        draft: DraftSection,
        settings: ContextModuleSettings,
        limits: GrowthLimits,
    ) -> None:
        self._head = head
        self._taps = taps
        self._draft = draft
        self._limits = limits
        self._shortlist = shortlist
        self._calibration = Calibration()
        self._cost = PassCost()
        shape, store = head.context_shape, ContextStore(settings.store_tokens, computed_type(settings.weights))
        self._sessions = Sessions(
            lambda start: EagleSession(start, shape, store, head.device),
            vocabulary_size=head.vocabulary_size,
            most=settings.sequences,
        )

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Propose a tree for each row, in order."""
        now = time.perf_counter()
        proposals = {row.sequence_id: Proposal(row.sequence_id, row.base_len) for row in rows}
        served: list[tuple[DraftRow, EagleSession]] = []
        queues: dict[EagleSession, list[Piece]] = {}
        for row in rows:
            session = self._sessions.apply(row)
            if isinstance(session, RowFault):
                proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len, fault=session)
                continue
            if row.start is not None:
                session.restore()
            try:
                queues[session] = session.take(row.evidence, self._taps)
            except ValueError as error:
                fault = RowFault(RowFaultCode.INVALID, f"evidence: {error}")
                proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len, fault=fault)
                continue
            served.append((row, session))
        self._catch_up(queues)
        growths: list[tuple[DraftRow, EagleGrowth]] = []
        for row, session in served:
            session.observe(self._calibration)
            session.commit_times.record(len(session.tokens), now, self._cost)
            budget, last = row.budget.within(self._draft.max_nodes, self._draft.max_depth), session.grown
            if last is not None and last.budget == budget and last.start == session.start:
                proposals[row.sequence_id] = last.proposal
            elif budget.max_depth and session.output is not None and session.output[0] == session.anchor - 1:
                growths.append((row, self._growth(session, session.output[1], budget)))
        if growths:
            self._grow([growth for _, growth in growths])
        for row, growth in growths:
            tree, probabilities, origins = growth.tree()
            proposal = Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities, origins=origins)
            growth.session.set_grown(growth.budget, growth.root, proposal)
            proposals[row.sequence_id] = proposal
        return tuple(proposals[row.sequence_id] for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for these sequences. Unknown ones are no error."""
        self._sessions.release(sequence_ids)

    def _growth(self, session: EagleSession, output: Tensor, budget: DraftBudget) -> EagleGrowth:
        shape = self._head.context_shape
        return EagleGrowth(session, output, budget, shape.window, shape.scratch)

    def _catch_up(self, queues: dict[EagleSession, list[Piece]]) -> None:
        """Run committed tokens through the head, in each pass some of each sequence."""
        most, reach = self._head.context_shape.scratch, self._head.context_shape.window
        while queues := {session: queue for session, queue in queues.items() if queue}:
            parts: list[tuple[EagleSession, Piece]] = []
            for session, queue in queues.items():
                first, taps = queue.pop(0)
                dropped = max(0, session.window.oldest - first)  # beyond the window
                first, taps = first + dropped, taps[dropped:]
                if len(taps) > most:
                    queue.insert(0, (first + most, taps[most:]))
                if len(taps):
                    parts.append((session, (first, taps[:most])))
            if not parts:
                continue
            pieces = [
                committed_piece(session.window, first, session.tokens[first + 1 : first + 1 + len(taps)], reach)
                for session, (first, taps) in parts
            ]
            outputs = self._head.run(self._head.features(torch.cat([taps for _, (_, taps) in parts])), pieces)
            for (session, (first, taps)), output in zip(parts, outputs, strict=True):
                end = first + len(taps)
                session.window.mark(first, end)
                session.share(first, end)
                session.output = (end - 1, output)

    def _grow(self, growths: Sequence[EagleGrowth]) -> None:
        """Expand all trees, depth by depth."""
        outputs = torch.stack([growth.root_output for growth in growths])
        active, depth, begun = list(growths), 0, 0.0
        while True:
            self._add_candidates(active, outputs)
            if depth:
                self._cost.record_pass(time.perf_counter() - begun)
            depth += 1
            active = [growth for growth in active if growth.choose(depth, self._limits.width, self._first_rate(growth))]
            gain = sum(growth.gain for growth in active)
            if not any(growth.is_short for growth in active) and not self._cost.is_worthwhile(gain, len(growths)):
                return
            begun = time.perf_counter()
            features = torch.stack([feature for growth in active for feature in growth.features()])
            outputs = self._head.run(features, [growth.piece() for growth in active])
            parts = torch.split(outputs, [len(growth.frontier) for growth in active])
            for growth, part in zip(active, parts, strict=True):
                growth.keep_outputs(part)

    def _first_rate(self, growth: EagleGrowth) -> float:
        """The rate at which the target takes a first candidate below another."""
        return self._calibration.first_rate(KINDS[growth.session.is_greedy, True])

    def _add_candidates(self, growths: Sequence[EagleGrowth], outputs: Tensor) -> None:
        """Add the candidates below all nodes of the frontiers, whose outputs are [nodes, hidden size]."""
        contexts = [context for growth in growths for context in growth.contexts()]
        leading = self._shortlist.leading(self._head.logits(outputs), contexts, self._limits.siblings)
        tokens, confidences = self._shortlist.tokens(leading.columns).tolist(), leading.confidences.tolist()
        first = 0
        for growth in growths:
            part = slice(first, first + len(growth.frontier))
            growth.add(tokens[part], confidences[part], self._calibration)
            first = part.stop


def load_eagle_drafter(
    settings: ContextModuleSettings, draft: DraftSection, target: TargetSection, limits: GrowthLimits
) -> EagleTreeDrafter:
    """Load the module of the kind `eagle`; see `EagleTreeDrafter`. Raises `ModelLoadError` and `ConfigurationError`."""
    expected: tuple[type[EagleHead | PublicModule], ...] = (EagleHead, PublicModule)
    loaded = load_served_module(settings, target, "eagle", expected)
    scratch = max(_LEAST_SCRATCH, limits.width * draft.max_depth)
    head: HeadPass
    if isinstance(loaded.module, EagleHead):
        head = EaglePass(loaded.module, loaded.ends, settings.weights, scratch, target.compile_directory)
    else:
        head = FeaturePass(loaded.module, loaded.ends, settings.weights, scratch, target.compile_directory)
    taps = TapReader(loaded.card.taps, target, loaded.card.hidden_size)
    return EagleTreeDrafter(head, loaded.shortlist, taps, draft, settings, limits)
