"""A drafter with heads that predict all depths at once from one hidden state of the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftRow, Evidence, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from workers.draft.common.modules.captured_windows import capture_of
from workers.draft.common.modules.learned_modules import LearnedModules, LearningDrafter
from workers.draft.common.modules.module_settings import ModuleSettings
from workers.draft.common.modules.pass_of_salt import PassOfSalt
from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.path_trees import PathDrafter, PathHistory, PathTrees, Wanted, decision_contexts
from workers.draft.common.modules.product import MakeProduct, Product
from workers.draft.common.modules.ranked_paths import RankedPaths, TreeForm
from workers.draft.common.modules.served_module import ServedModule, load_served_module
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import CollectedStates, TextCollector
from workers.draft.common.sessions import DraftingSession, Sessions
from workers.draft.heads.hydra_heads import HydraHeads
from workers.draft.heads.own_heads import OwnHeads
from workers.draft.heads.parallel_pass import ParallelPass
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.public import PublicModule
from workers.model.drafting.selector import Selector
from workers.model.public_shapes import HydraShape
from workers.sampling.context import DecisionContext


class Heads(Protocol):
    """Predicts all depths of rows at once."""

    depths: int
    hidden_size: int
    vocabulary_size: int

    def rank(
        self, taps: Sequence[Tensor], last: Sequence[int], contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        """Rank the candidates of each row at each depth; see `ParallelPass`."""


class HeadsSession(DraftingSession):
    """Committed tokens, the target's last hidden state, and the last draft."""

    __slots__ = ("collected", "hidden", "hidden_position", "history")

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self.hidden: Tensor | None = None
        """[hidden size] at `hidden_position`."""
        self.hidden_position = -1
        self.history = PathHistory()
        self.collected = CollectedStates()

    def forget_draft(self) -> None:
        """Drop the last draft, and the hidden states of tokens that were removed."""
        self.history.last = None
        self.collected.forget()
        if self.hidden_position >= len(self.tokens):
            self.hidden = None

    def take(self, evidence: Sequence[Evidence], reader: TapReader) -> None:
        """Store the hidden state at the last position but one. Raises `ValueError` for one of a wrong width."""
        position = len(self.tokens) - 2
        for one in reversed(evidence):
            if one.hidden is not None and one.hidden.first <= position < one.hidden.end:
                found = reader.read(one)
                if found is not None:
                    self.hidden, self.hidden_position = found[1][position - found[0], -1].clone(), position
                return

    @property
    def is_ready(self) -> bool:
        """Whether the hidden state that a draft needs is stored. It is not where its KV came from a cache."""
        return self.hidden is not None and self.hidden_position == len(self.tokens) - 2


class HeadsDrafter(LearningDrafter, PathDrafter[HeadsSession]):
    """Drafts trees of the heads' candidates, one pass for all rows. It is a `DraftMethod`.

    A sequence without the hidden state before its last token gets no draft.
    """

    def __init__(self, heads: PassOfSalt[Heads], reader: TapReader, draft: DraftSection, form: TreeForm) -> None:
        super().__init__(PathTrees(draft, heads.own.depths, form, heads))
        self._passes: PassOfSalt[Heads] = heads
        self._collector = TextCollector(reader)
        self._siblings = form.siblings
        self._sessions = Sessions(HeadsSession, self._collector.finish, vocabulary_size=heads.own.vocabulary_size)

    def _update(
        self, rows: Sequence[DraftRow], proposals: dict[SequenceId, Proposal]
    ) -> Iterator[tuple[DraftRow, HeadsSession]]:
        return self._sessions.update(rows, proposals, self._take)

    def _take(self, session: HeadsSession, row: DraftRow) -> None:
        session.take(row.evidence, self._collector.reader)
        self._collector.take(session, row.evidence)

    def _is_ready(self, session: HeadsSession) -> bool:
        return session.is_ready

    def _draft(self, wanted: Sequence[Wanted[HeadsSession]], proposals: dict[SequenceId, Proposal]) -> None:
        """Rank the candidates of the rows, those with the same weights together."""
        for heads, rows in self._passes.groups(wanted, lambda one: one.session.start.cache_salt):
            depths = max(one.budget.max_depth for one in rows)
            sessions = [one.session for one in rows]
            taps = [session.hidden for session in sessions if session.hidden is not None]
            last = [session.tokens[-1] for session in sessions]
            contexts = decision_contexts(sessions, depths)
            self._build(rows, heads.rank(taps, last, contexts, self._siblings), proposals)


def load_heads_drafter(
    settings: ModuleSettings, draft: DraftSection, target: TargetSection, form: TreeForm
) -> HeadsDrafter:
    """Load the heads, warm them up and make their drafter; see `HeadsDrafter`.

    Raises `ModelLoadError`, and `ConfigurationError` if the target does not take the taps.
    """
    expected: tuple[type[MedusaHeads | PublicModule], ...] = (MedusaHeads, PublicModule)
    loaded = load_served_module(settings, target, "heads", expected)
    module = loaded.module
    if isinstance(module, MedusaHeads):
        parallel = ParallelHeads(module, loaded)
        heads: PassOfSalt[Heads] = PassOfSalt(parallel)
        if draft.learn == "on":
            heads = LearnedModules(parallel, module, loaded, parallel.with_weights)
    elif isinstance(module.shape, HydraShape):
        heads = PassOfSalt(HydraHeads(module, loaded))
    else:
        heads = PassOfSalt(OwnHeads(module, loaded))
    if isinstance(heads.own, ParallelPass):
        heads.own.capture(capture_of(heads.own.device, target))
    _warm_up(heads.own, form.siblings)
    reader = TapReader(loaded.card.taps, target, heads.own.hidden_size)
    return HeadsDrafter(heads, reader, draft, form)


def _warm_up(heads: Heads, siblings: int) -> None:
    """Rank zeros in a few widths, so that the first proposals do not wait for one-time work."""
    zeros = torch.zeros(heads.hidden_size)
    for rows in (1, 2, 4, 8):
        contexts = [DecisionContext(SamplingParameters(seed=0), (0,), 1)] * (rows * heads.depths)
        heads.rank([zeros] * rows, [0] * rows, contexts, siblings)


class ParallelHeads(ParallelPass):
    """The weights of trained heads, packed for the device, and the ranking of their candidates.

    It computes what `MedusaHeads` does, with few products for all rows and depths.
    """

    def __init__(self, module: MedusaHeads, loaded: ServedModule[Any]) -> None:
        ends, make = loaded.ends, loaded.make
        self.depths = module.shape.depths
        self.hidden_size = ends.hidden_size
        self.vocabulary_size = len(ends.embedding)
        self.device = ends.embedding.device
        self._ends, self._make = ends, make
        self._mix = None if module.mix is None else _mix_of(module.mix, make)
        self._heads = make(module.weights)
        self.ranker = PathRanker(ends, module.selector, make, loaded.shortlist)

    def with_weights(self, module: MedusaHeads) -> ParallelHeads:
        """Heads that compute with the weights of `module`, but with this selector, and share what is the target's."""
        other = copy(self)
        other.graphs = None
        other._mix = None if module.mix is None else _mix_of(module.mix, self._make)
        other._heads = self._make(module.weights)
        return other

    def computed(self, states: Tensor, last: Tensor, depths: int) -> tuple[Tensor, Tensor]:
        hidden = self._ends.final_states(states)
        if self._mix is not None:
            inner, outer = self._mix
            hidden = hidden + outer(silu(inner(torch.cat([hidden, self._ends.embedding[last].float()], dim=1))))
        rows, size = hidden.shape
        deep = silu(self._heads(hidden)).view(rows, self.depths, size)[:, :depths]
        found = hidden.unsqueeze(1) + deep
        return found, self.ranker.logits(found)


def _mix_of(mix: Selector, make: MakeProduct) -> tuple[Product, Product]:
    return make(mix.inner.weight), make(mix.outer.weight)
