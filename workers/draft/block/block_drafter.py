"""Drafts whole blocks: one pass for the context that the target showed, one for the blocks of all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from workers.draft.block.block_pass import BlockPass
from workers.draft.block.markov_ranker import MarkovRanker
from workers.draft.block.masked_pass import MaskedBlockPass
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.common.modules.module_settings import ContextModuleSettings, Weights
from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.path_trees import PathDrafter, PathHistory, PathTrees, Wanted, decision_contexts
from workers.draft.common.modules.ranked_paths import RankedPaths, TreeForm
from workers.draft.common.modules.served_module import ServedModule, computed_type, load_served_module
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.sessions import Sessions
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.public import PublicModule
from workers.model.fused_taps import fused_width
from workers.model.public_shapes import MaskedBlockShape
from workers.sampling.context import DecisionContext

ComputeContext = Callable[[Tensor, Tensor], ContextRows]
"""Computes what is kept of positions from their taps [tokens, taps, hidden size] and the positions [tokens]."""
RankBlocks = Callable[[Tensor, Sequence[int], Sequence[DecisionContext], int], list[RankedPaths]]
"""Ranks the candidates of rows from their vectors for the head, float32 [rows, depths, hidden size], the rows' last
tokens, the contexts [rows x depths] of the decisions, and the most candidates that are listed below one."""


class BlockPasses(Protocol):
    """The passes of a block drafter; `BlockPass` says what they compute."""

    depths: int
    vocabulary_size: int
    device: torch.device
    context_shape: ContextShape

    def context(self, taps: Tensor, positions: Tensor) -> ContextRows:
        """What later blocks need of `taps` [tokens, taps, hidden size] at `positions` [tokens]."""
        ...

    def draft(self, last: Sequence[int], anchors: Sequence[int], windows: Sequence[ContextWindow]) -> Tensor:
        """Normalised hidden vectors for the head, [rows, depths, hidden size]."""
        ...


class BlockSession(ContextSession):
    """A sequence with its last draft."""

    __slots__ = ("history",)

    def __init__(self, start: SequenceStart, shape: ContextShape, store: ContextStore, device: torch.device) -> None:
        super().__init__(start, shape, store, device)
        self.history = PathHistory()

    def forget_draft(self) -> None:
        """Drop the last draft."""
        self.history.last = None


class ContextReader:
    """Collects taps, row by row, and stores their context in the sessions."""

    def __init__(self, taps: TapReader, compute: ComputeContext) -> None:
        self._taps = taps
        self._compute = compute
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
        if not self._found:
            return
        found, self._found = self._found, []
        positions = [begin + index for _, begin, taps in found for index in range(len(taps))]
        rows = self._compute(torch.cat([taps for _, _, taps in found]), torch.tensor(positions))
        done = 0
        for session, begin, taps in found:
            session.add(begin, rows.part(done, done + len(taps)))
            done += len(taps)


class BlockTreeDrafter(PathDrafter[BlockSession]):
    """Drafts trees of a block drafter's candidates. It is a `DraftMethod`.

    A sequence whose hidden states at the last position but one are unknown gets no draft. Other unknown positions are
    not attended to.
    """

    def __init__(
        self,
        passes: BlockPasses,
        rank: RankBlocks,
        taps: TapReader,
        draft: DraftSection,
        settings: ContextModuleSettings,
        form: TreeForm,
    ) -> None:
        super().__init__(PathTrees(draft, passes.depths, form))
        self._passes = passes
        self._rank = rank
        self._siblings = form.siblings
        shape, store = passes.context_shape, ContextStore(settings.store_tokens, computed_type(settings.weights))
        self._reader = ContextReader(taps, passes.context)
        self._sessions = Sessions(
            lambda start: BlockSession(start, shape, store, passes.device),
            vocabulary_size=passes.vocabulary_size,
            most=settings.sequences,
        )

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for these sequences. Unknown ones are no error."""
        self._sessions.release(sequence_ids)

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

    def _is_ready(self, session: BlockSession) -> bool:
        return session.window.is_known(session.anchor - 1, session.anchor)

    @torch.inference_mode()
    def _draft(self, wanted: Sequence[Wanted[BlockSession]], proposals: dict[SequenceId, Proposal]) -> None:
        """Draft all rows' blocks in one pass, and rank them to the same depth."""
        sessions = [one.session for one in wanted]
        last = [session.tokens[-1] for session in sessions]
        hidden = self._passes.draft(
            last, [session.anchor for session in sessions], [session.window for session in sessions]
        )
        depths = max(one.budget.max_depth for one in wanted)
        contexts = decision_contexts(sessions, depths)
        self._build(wanted, self._rank(hidden[:, :depths], last, contexts, self._siblings), proposals)


def load_block_drafter(
    settings: ContextModuleSettings, draft: DraftSection, target: TargetSection, form: TreeForm
) -> BlockTreeDrafter:
    """Load the module of the kind `block`; see `BlockTreeDrafter`. Raises `ModelLoadError` and `ConfigurationError`."""
    expected: tuple[type[BlockDrafter | PublicModule], ...] = (BlockDrafter, PublicModule)
    loaded = load_served_module(settings, target, "block", expected)
    taps = TapReader(loaded.card.taps, target, loaded.card.hidden_size, fused_width(loaded.card))
    passes, rank = _served(loaded, settings.weights, target.compile_directory, takes_features=taps.is_fused)
    return BlockTreeDrafter(passes, rank, taps, draft, settings, form)


def _served(
    loaded: ServedModule[BlockDrafter | PublicModule], weights: Weights, directory: str | None, *, takes_features: bool
) -> tuple[BlockPasses, RankBlocks]:
    """The passes of a module, and the ranking of what they predict."""
    module, ends = loaded.module, loaded.ends
    selector = None
    if isinstance(module, BlockDrafter):
        passes: BlockPasses = BlockPass(module, ends, weights, directory)
        selector = module.selector
    else:
        passes = MaskedBlockPass(module, ends, weights, directory, takes_features=takes_features)
        shape = module.shape
        if isinstance(shape, MaskedBlockShape) and (shape.corrects_logits or shape.confidence != "none"):
            return passes, MarkovRanker(module, ends, loaded.make, loaded.shortlist).rank
    ranker = PathRanker(ends, selector, loaded.make, loaded.shortlist)
    return passes, lambda hidden, _, contexts, siblings: ranker.rank(hidden, contexts, siblings)
