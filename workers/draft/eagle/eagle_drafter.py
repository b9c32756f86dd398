"""Drafts with an EAGLE head: committed tokens catch up with the target's hidden states, then a tree is expanded."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from workers.draft.common.modules.captured_windows import capture_of
from workers.draft.common.modules.context_store import ContextMemory, ContextStore
from workers.draft.common.modules.learned_modules import LearnedModules, LearningDrafter
from workers.draft.common.modules.module_settings import ContextModuleSettings
from workers.draft.common.modules.pass_of_salt import PassOfSalt, ValueOfSalt
from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.common.modules.served_module import computed_type, load_served_module
from workers.draft.common.modules.shortlist import Shortlist
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import CONTEXT, TextCollector
from workers.draft.common.sessions import Sessions
from workers.draft.common.trees.calibration import KINDS, Calibration
from workers.draft.common.trees.pass_cost import PassCost
from workers.draft.eagle.eagle_growth import EagleGrowth, GrowthLimits
from workers.draft.eagle.eagle_pass import EaglePass
from workers.draft.eagle.eagle_session import EagleSession
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_context import HeadContext
from workers.draft.eagle.head_pass import HeadPass
from workers.draft.eagle.parallel_drafter import ParallelTreeDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.public import PublicModule
from workers.model.fused_taps import fused_width
from workers.transfer import lists_together

LEAST_SCRATCH = 64
"""Least number of committed tokens of one sequence that go through the head in one pass."""


class EagleTreeDrafter(LearningDrafter):
    """Drafts trees with one pass for each depth. It is a `DraftMethod`.

    A sequence whose hidden states at the last position but one are unknown gets no draft. Other unknown positions are
    not attended to.

    Weights that replace others draft from the next call on. The keys and values that a running sequence has of the
    former weights stay: no draft can change a text. Sequences that begin later look for none of them in the store.
    """

    def __init__(
        self,
        heads: PassOfSalt[HeadPass],
        shortlist: Shortlist,
        taps: TapReader,
        draft: DraftSection,
        memory: ContextMemory,
        limits: GrowthLimits,
    ) -> None:
        self._passes: PassOfSalt[HeadPass] = heads
        self._draft = draft
        self._limits = limits
        self._shortlist = shortlist
        self._calibrations = ValueOfSalt(heads, Calibration)
        """How often the target takes what the weights of a pass draft."""
        self._cost = PassCost()
        self._collector = TextCollector(taps, CONTEXT)
        own, store = heads.own, memory.store
        sessions = Sessions(
            lambda start: EagleSession(start, own.context_shape, store, own.device, heads.version(start.cache_salt)),
            self._collector.finish,
            vocabulary_size=own.vocabulary_size,
            most=memory.sequences,
        )
        self._context = HeadContext(heads, self._collector, sessions)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        now = time.perf_counter()
        proposals = {row.sequence_id: Proposal(row.sequence_id, row.base_len) for row in rows}
        growths: list[tuple[DraftRow, EagleGrowth]] = []
        for row, session in self._context.update(rows, proposals):
            session.observe(self._calibration(session))
            session.commit_times.record(len(session.tokens), now, self._cost)
            budget, last = row.budget.within(self._draft.max_nodes, self._draft.max_depth), session.grown
            if last is not None and last.budget == budget and last.start == session.start:
                proposals[row.sequence_id] = last.proposal
            elif budget.max_depth and session.output is not None and session.output[0] == session.anchor - 1:
                growths.append((row, self._growth(session, session.output[1], budget)))
        for head, group in self._passes.groups(growths, lambda one: one[1].session.start.cache_salt):
            self._grow(head, [growth for _, growth in group], len(growths))
        for row, growth in growths:
            tree, probabilities, origins = growth.tree()
            proposal = Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities, origins=origins)
            growth.session.set_grown(growth.budget, growth.root, proposal)
            proposals[row.sequence_id] = proposal
        return tuple(proposals[row.sequence_id] for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._context.release(sequence_ids)

    def ignore_times(self) -> None:
        self._cost.is_free = True

    def _growth(self, session: EagleSession, output: Tensor, budget: DraftBudget) -> EagleGrowth:
        shape = self._passes.own.context_shape
        return EagleGrowth(session, output, budget, shape.window, shape.scratch)

    def _grow(self, head: HeadPass, growths: Sequence[EagleGrowth], rows: int) -> None:
        """Expand trees with one head, depth by depth. `rows` is the number of rows that wait for it."""
        logits = head.logits(torch.stack([growth.root_output for growth in growths]))
        active, depth, begun = list(growths), 0, 0.0
        while True:
            self._add_candidates(active, logits)
            if depth:
                self._cost.record_pass(time.perf_counter() - begun)
            depth += 1
            active = [growth for growth in active if growth.choose(depth, self._limits.width, self._first_rate(growth))]
            gain = sum(growth.gain for growth in active)
            if not any(growth.is_short for growth in active) and not self._cost.is_worthwhile(gain, rows):
                return
            begun = time.perf_counter()
            features = torch.stack([feature for growth in active for feature in growth.features()])
            outputs, logits = head.expand(features, [growth.piece() for growth in active])
            parts = torch.split(outputs, [len(growth.frontier) for growth in active])
            for growth, part in zip(active, parts, strict=True):
                growth.keep_outputs(part)

    def _first_rate(self, growth: EagleGrowth) -> float:
        """The rate at which the target takes a first candidate below another."""
        return self._calibration(growth.session).first_rate(KINDS[growth.session.is_greedy, True])

    def _calibration(self, session: EagleSession) -> Calibration:
        """The calibration of the weights that draft for a sequence."""
        return self._calibrations.of_salt(session.start.cache_salt)

    def _add_candidates(self, growths: Sequence[EagleGrowth], logits: Tensor) -> None:
        """Add the candidates below all nodes of the frontiers, whose logits are [nodes, draft vocabulary]."""
        contexts = [context for growth in growths for context in growth.contexts()]
        leading = self._shortlist.leading(logits, contexts, self._limits.siblings)
        tokens, confidences = lists_together([self._shortlist.tokens(leading.columns), leading.confidences])
        first = 0
        for growth in growths:
            part = slice(first, first + len(growth.frontier))
            growth.add(tokens[part], confidences[part], self._calibration(growth.session))
            first = part.stop


def load_eagle_drafter(
    settings: ContextModuleSettings, draft: DraftSection, target: TargetSection, limits: GrowthLimits
) -> EagleTreeDrafter | ParallelTreeDrafter:
    """Load the module of the kind `eagle`; see `EagleTreeDrafter`, and `ParallelTreeDrafter` for P-EAGLE.

    Raises `ModelLoadError` and `ConfigurationError`.
    """
    expected: tuple[type[EagleHead | PublicModule], ...] = (EagleHead, PublicModule)
    loaded = load_served_module(settings, target, "eagle", expected)
    scratch = max(LEAST_SCRATCH, limits.width * draft.max_depth)
    taps = TapReader(loaded.card.taps, target, loaded.card.hidden_size, fused_width(loaded.card))
    memory = ContextMemory(
        ContextStore(settings.store_tokens, computed_type(settings.weights)), settings.kept_sequences
    )
    if isinstance(loaded.module, EagleHead):
        own = EaglePass(loaded.module, loaded.ends, settings.weights, scratch, target.compile_directory)
        own.capture(capture_of(own.device, target), loaded.module.shape.layer.hidden_size, limits.width)
        heads: PassOfSalt[HeadPass] = PassOfSalt(own)
        if draft.learn == "on":
            heads = LearnedModules(own, loaded.module, loaded, own.with_weights)
        return EagleTreeDrafter(heads, loaded.shortlist, taps, draft, memory, limits)
    head = FeaturePass(loaded.module, loaded.ends, settings.weights, scratch, target.compile_directory)
    nodes = 0 if head.depths else limits.width  # P-EAGLE expands none
    head.capture(capture_of(head.device, target), head.hidden_size, nodes)
    if not head.depths:
        heads = PassOfSalt(head)
        if draft.learn == "on" and head.is_trainable:
            heads = LearnedModules(head, loaded.module, loaded, head.with_weights)
        return EagleTreeDrafter(heads, loaded.shortlist, taps, draft, memory, limits)
    ranker = PathRanker(loaded.ends, None, lambda _: head.logits, loaded.shortlist)
    return ParallelTreeDrafter(head, ranker, taps, draft, memory, TreeForm(limits.siblings))
