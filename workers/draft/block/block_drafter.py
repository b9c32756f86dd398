"""Drafts whole blocks: one pass for the context that the target showed, one for the blocks of all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.block.block_pass import BlockPass
from workers.draft.block.block_passes import BlockPasses
from workers.draft.block.markov_ranker import MarkovRanker
from workers.draft.block.masked_pass import MaskedBlockPass
from workers.draft.common.modules.captured_windows import capture_of
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.modules.context_window import ContextShape
from workers.draft.common.modules.learned_modules import LearnedModules, LearningDrafter
from workers.draft.common.modules.module_settings import ContextModuleSettings
from workers.draft.common.modules.pass_of_salt import PassOfSalt
from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.path_trees import PathDrafter, PathHistory, PathTrees, Wanted, decision_contexts
from workers.draft.common.modules.product import stored_type
from workers.draft.common.modules.ranked_paths import RankedPaths, TreeForm
from workers.draft.common.modules.served_module import ServedModule, computed_type, load_served_module
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import CONTEXT, CollectedStates, TextCollector
from workers.draft.common.sessions import Sessions
from workers.forward.native.markov import load_markov_slots
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.public import PublicModule
from workers.model.fused_taps import fused_width
from workers.model.public_shapes import MaskedBlockShape
from workers.sampling.context import DecisionContext

RankBlocks = Callable[[Tensor, Sequence[int], Sequence[DecisionContext], int], list[RankedPaths]]
"""Ranks the candidates of rows from their vectors for the head, float32 [rows, depths, hidden size], the rows' last
tokens, the contexts [rows x depths] of the decisions, and the most candidates that are listed below one."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedBlocks:
    """What drafts with some weights."""

    passes: BlockPasses
    rank: RankBlocks


class BlockSession(ContextSession):
    """A sequence with its last draft."""

    __slots__ = ("collected", "history")

    def __init__(
        self, start: SequenceStart, shape: ContextShape, store: ContextStore, device: torch.device, version: int
    ) -> None:
        """`version`: see `SegmentKeys`."""
        super().__init__(start, shape, store, device, version=version)
        self.history = PathHistory()
        self.collected = CollectedStates()

    def forget_draft(self) -> None:
        """Drop the last draft, and the hidden states of tokens that were removed."""
        self.history.last = None
        self.collected.forget()


class ContextReader:
    """Collects taps, row by row, and stores the context of all of them in the sessions."""

    def __init__(self, taps: TapReader, blocks: PassOfSalt[ServedBlocks]) -> None:
        self._taps = taps
        self._blocks = blocks
        self._found: list[tuple[ContextSession, int, Tensor]] = []

    def take(self, session: ContextSession, row: DraftRow) -> None:
        """Take the hidden states of one row, those of its tokens.

        Raises `ValueError` for hidden states of a wrong width; then nothing of the row is taken.
        """
        taken: list[tuple[ContextSession, int, Tensor]] = []
        for evidence in row.evidence:
            found = self._taps.read(evidence)
            if found is None:
                continue
            first, taps = found
            taps = taps[: max(0, len(session.tokens) - first)]
            if len(taps):
                taken.append((session, first, taps))
        self._found += taken

    def store(self) -> None:
        """Compute the context of everything that was taken and store it."""
        taken, self._found = self._found, []
        for blocks, found in self._blocks.groups(taken, lambda one: one[0].start.cache_salt):
            positions = [begin + index for _, begin, taps in found for index in range(len(taps))]
            rows = blocks.passes.context(torch.cat([taps for _, _, taps in found]), torch.tensor(positions))
            blocks.passes.store([(session, begin, len(taps)) for session, begin, taps in found], rows)


class BlockTreeDrafter(LearningDrafter, PathDrafter[BlockSession]):
    """Drafts trees of a block drafter's candidates. It is a `DraftMethod`.

    A sequence whose hidden states at the last position but one are unknown gets no draft. Other unknown positions are
    not attended to.

    Weights that replace others draft from the next call on. The keys and values that a running sequence has of the
    former weights stay: no draft can change a text. Sequences that begin later look for none of them in the store.
    """

    def __init__(
        self,
        blocks: PassOfSalt[ServedBlocks],
        taps: TapReader,
        draft: DraftSection,
        settings: ContextModuleSettings,
        form: TreeForm,
    ) -> None:
        passes = blocks.own.passes
        super().__init__(PathTrees(draft, passes.depths, form, blocks))
        self._passes: PassOfSalt[ServedBlocks] = blocks
        self._siblings = form.siblings
        shape, store = passes.context_shape, ContextStore(settings.store_tokens, computed_type(settings.weights))
        self._reader = ContextReader(taps, blocks)
        self._collector = TextCollector(taps, CONTEXT)
        self._sessions = Sessions(
            lambda start: BlockSession(start, shape, store, passes.device, blocks.version(start.cache_salt)),
            self._collector.finish,
            vocabulary_size=passes.vocabulary_size,
            most=settings.kept_sequences,
        )

    @torch.inference_mode()
    def _update(
        self, rows: Sequence[DraftRow], proposals: dict[SequenceId, Proposal]
    ) -> list[tuple[DraftRow, BlockSession]]:
        served = list(self._sessions.update(rows, proposals, self._take))
        self._reader.store()
        return served

    def _take(self, session: BlockSession, row: DraftRow) -> None:
        if row.start is not None:
            session.restore()
        self._reader.take(session, row)
        self._collector.take(session, row.evidence)

    def _is_ready(self, session: BlockSession) -> bool:
        return session.window.is_known(session.anchor - 1, session.anchor)

    @torch.inference_mode()
    def _draft(self, wanted: Sequence[Wanted[BlockSession]], proposals: dict[SequenceId, Proposal]) -> None:
        """Draft the blocks of rows with the same weights in one pass, and rank them to the same depth."""
        for blocks, rows in self._passes.groups(wanted, lambda one: one.session.start.cache_salt):
            sessions = [one.session for one in rows]
            last = [session.tokens[-1] for session in sessions]
            hidden = blocks.passes.draft(
                last, [session.anchor for session in sessions], [session.window for session in sessions]
            )
            depths = max(one.budget.max_depth for one in rows)
            contexts = decision_contexts(sessions, depths)
            self._build(rows, blocks.rank(hidden[:, :depths], last, contexts, self._siblings), proposals)


def load_block_drafter(
    settings: ContextModuleSettings, draft: DraftSection, target: TargetSection, form: TreeForm
) -> BlockTreeDrafter:
    """Load the module of the kind `block`; see `BlockTreeDrafter`. Raises `ModelLoadError` and `ConfigurationError`."""
    expected: tuple[type[BlockDrafter | PublicModule], ...] = (BlockDrafter, PublicModule)
    loaded = load_served_module(settings, target, "block", expected)
    taps = TapReader(loaded.card.taps, target, loaded.card.hidden_size, fused_width(loaded.card))
    learns, directory = draft.learn == "on", target.compile_directory
    if isinstance(loaded.module, BlockDrafter):
        blocks = _own_blocks(loaded.module, loaded, directory, learns=learns)
    else:
        blocks = _public_blocks(loaded.module, loaded, directory, learns=learns, takes_features=taps.is_fused)
    passes = blocks.own.passes
    passes.capture(capture_of(passes.device, target))
    return BlockTreeDrafter(blocks, taps, draft, settings, form)


def _own_blocks(
    module: BlockDrafter, loaded: ServedModule[Any], directory: str | None, *, learns: bool
) -> PassOfSalt[ServedBlocks]:
    """The passes of a module of Pilotfish's own format; all weights have its selector in common."""
    rank = _without_last(PathRanker(loaded.ends, module.selector, loaded.make, loaded.shortlist))

    def with_weights(one: BlockDrafter) -> ServedBlocks:
        return ServedBlocks(BlockPass(one, loaded.ends, loaded.settings.weights, directory), rank)

    own = with_weights(module)
    return LearnedModules(own, module, loaded, with_weights) if learns else PassOfSalt(own)


def _public_blocks(
    module: PublicModule, loaded: ServedModule[Any], directory: str | None, *, learns: bool, takes_features: bool
) -> PassOfSalt[ServedBlocks]:
    """The passes of a public module. Of these, DSpark drafters alone learn."""
    ends, weights, shape = loaded.ends, loaded.settings.weights, module.shape
    passes = MaskedBlockPass(module, ends, weights, directory, takes_features=takes_features)
    if not isinstance(shape, MaskedBlockShape) or not (shape.corrects_logits or shape.confidence != "none"):
        rank = _without_last(PathRanker(ends, None, loaded.make, loaded.shortlist))
        return PassOfSalt(ServedBlocks(passes, rank))
    load = partial(load_markov_slots, dtype=stored_type(weights, directory), directory=directory)
    markov = MarkovRanker(module, ends, loaded.make, loaded.shortlist, load)
    own = ServedBlocks(passes, markov.rank)
    if not learns or not shape.is_trainable:
        return PassOfSalt(own)

    def with_weights(one: PublicModule) -> ServedBlocks:
        return ServedBlocks(MaskedBlockPass(one, ends, weights, directory), markov.with_weights(one).rank)

    return LearnedModules(own, module, loaded, with_weights)


def _without_last(ranker: PathRanker) -> RankBlocks:
    """A ranking that does not read the rows' last tokens."""
    return lambda hidden, _, contexts, siblings: ranker.rank(hidden, contexts, siblings)
