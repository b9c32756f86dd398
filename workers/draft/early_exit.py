"""Early exit: the target drafts with a part of its own layers, and shares its own keys and values with the draft.

The part is its first layers (LayerSkip, Elhoushi et al. 2024), or all but some attention and feed-forward networks
(Draft & Verify, Zhang et al. 2024). A distilled module brings the layers, and a norm for their output.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from cluster.core.config.base import ModuleSection, Rate
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftRow, NextTokens, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftedPath, DraftingTarget, DraftPasses, TargetPart
from cluster.core.request import SamplingParameters
from cluster.core.tree import ROOT, TokenTree
from workers.draft.common.sessions import MOST_SESSIONS
from workers.draft.common.trees.calibration import KINDS, Calibration, Kind
from workers.draft.registry import Places, register
from workers.sampling.context import GREEDY_BELOW

logger = logging.getLogger(__name__)

_DEFAULT_SHARE = 1 / 3
"""Share of the target's layers that draft where no setting names a part."""

_Layers = Annotated[tuple[Annotated[int, Field(ge=0, le=4095)], ...], Field(max_length=512)]


class EarlyExitSettings(ModuleSection):
    """The part of the target that drafts: a module, or chosen layers; unset, the first third of its layers."""

    draft_kind: ClassVar[str] = "exit"
    layers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of the target's first layers that draft; unset: all where parts are skipped, else a third of them."""
    skip_attention: _Layers = ()
    """Layers, from 0, whose attention the draft leaves out."""
    skip_mlp: _Layers = ()
    """Layers, from 0, whose feed-forward network the draft leaves out."""
    candidates: Annotated[int, Field(ge=1, le=16)] = 3
    """Most drafted tokens at each depth: the first one is continued, the others are leaves. With several ranks: 1."""
    stop_below: Rate = 0.1
    """The draft ends where the estimated probability of its path is below this. With several ranks it has no effect."""

    @property
    def has_part(self) -> bool:
        """Whether the settings themselves name a part of the target."""
        return bool(self.layers is not None or self.skip_attention or self.skip_mlp)

    def check_selected(self) -> None:
        """Raise `ValueError` if there are two descriptions of the part."""
        if self.path and self.has_part:
            raise ValueError(f"path ({self.path}) must not be set together with layers, skip_attention or skip_mlp")


@dataclass(slots=True)
class _Draft:
    """The chain that is drafted for one sequence, and the other candidates beside it."""

    depth: int
    """Most tokens of the chain; 0: the sequence is not drafted for."""
    base_len: int
    last_token: int
    sampling: SamplingParameters
    next_tokens: NextTokens
    """What the sequence's grammar says of the chain's first tokens."""
    chain: list[int] = field(default_factory=list)
    levels: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """The candidates at each depth, with the part's confidence; the first one continues the chain."""
    probabilities: list[list[float]] = field(default_factory=list)
    """The estimated probability of each candidate's whole path."""
    is_done: bool = False

    def kind(self, level: int) -> Kind:
        """The kind of the candidates at a level, for the calibration."""
        return KINDS[self.sampling.temperature < GREEDY_BELOW, level > 0]


class EarlyExitDrafter:
    """Drafts all rows' chains together, one pass through the part per depth. It is a `DraftsByTarget`.

    The target stores the tokens, so this method stores nothing that could be out of sync. With several ranks, what it
    computes depends on rows and drafted tokens alone, which are the same on all of them.
    """

    def __init__(self, settings: EarlyExitSettings, draft: DraftSection, part: TargetPart | None) -> None:
        """Without a `part`, the first third of the target's layers drafts."""
        self._settings = settings
        self._max_nodes = draft.max_nodes
        self._max_depth = draft.max_depth
        self._part = part
        self._passes: DraftPasses | None = None
        self._calibration = Calibration()
        self._last: OrderedDict[SequenceId, _Draft] = OrderedDict()

    def bind(self, target: DraftingTarget) -> None:
        """Take the target's draft passes."""
        part = self._part
        if part is None:
            part = default_part(target.layers)
            logger.info(
                "early_exit drafts with the first %d of the target's %d layers; draft.early_exit.layers changes it",
                part.layers,
                target.layers,
            )
        self._passes = target.passes(part)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Propose a tree for each row, in order. Without room for its keys and values, a sequence has no draft.

        Raises `RuntimeError` if no target was bound.
        """
        if self._passes is None:
            raise RuntimeError("the method early_exit drafts only on the target, which must be bound first")
        for row in rows:
            self._observe(row)
        drafts = {row.sequence_id: draft for row in rows if (draft := self._start(self._passes, row)) is not None}
        with self._passes.reserved({name: draft.depth for name, draft in drafts.items()}) as ready:
            growing = {name: draft for name, draft in drafts.items() if name in ready}
            while growing:
                self._grow(self._passes, growing)
                growing = {name: draft for name, draft in growing.items() if not draft.is_done}
        return tuple(self._proposal(self._passes, row, drafts.get(row.sequence_id)) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._last.pop(sequence_id, None)

    def _start(self, passes: DraftPasses, row: DraftRow) -> _Draft | None:
        """An empty draft, if the row has a budget and the target stores the sequence."""
        depth = min(row.budget.max_depth, self._max_depth, row.budget.max_nodes, self._max_nodes)
        sampling = passes.sampling(row.sequence_id)
        if depth < 1 or sampling is None or not row.new_tokens:
            return None
        return _Draft(depth, row.base_len, row.new_tokens[-1], sampling, row.next_tokens)

    def _grow(self, passes: DraftPasses, drafts: Mapping[SequenceId, _Draft]) -> None:
        """Add one token to each chain. With several ranks, the probabilities are all 1 and end no chain."""
        paths = [
            DraftedPath(name, (draft.last_token, *draft.chain), len(draft.chain), draft.next_tokens)
            for name, draft in drafts.items()
        ]
        for draft, found in zip(drafts.values(), passes.next_tokens(paths, self._settings.candidates), strict=True):
            if not found:
                draft.is_done = True
                continue
            estimates = [confidence for _, confidence in found]
            if passes.has_probabilities:
                estimates = self._calibration.probabilities(estimates, draft.kind(len(draft.chain)))
            above = draft.probabilities[-1][0] if draft.probabilities else 1.0
            draft.levels.append(found)
            draft.probabilities.append([above * estimate for estimate in estimates])
            draft.chain.append(found[0][0])
            draft.is_done = (
                len(draft.chain) == draft.depth
                or draft.chain[-1] in draft.sampling.end_token_ids
                or draft.probabilities[-1][0] < self._settings.stop_below
            )

    def _proposal(self, passes: DraftPasses, row: DraftRow, draft: _Draft | None) -> Proposal:
        """The most probable nodes: the chain, and leaves below it."""
        if draft is None or not draft.chain:
            return Proposal(row.sequence_id, row.base_len)
        ranked = sorted(
            (-probability, level, rank)
            for level, probabilities in enumerate(draft.probabilities)
            for rank, probability in enumerate(probabilities)
        )
        chain_nodes: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        chosen = ranked[: min(row.budget.max_nodes, self._max_nodes)]
        for _, level, rank in chosen:
            parents.append(chain_nodes[level - 1] if level else ROOT)
            if rank == 0:
                chain_nodes.append(len(tokens))
            tokens.append(draft.levels[level][rank][0])
        if passes.has_probabilities:
            self._last[row.sequence_id] = draft
            self._last.move_to_end(row.sequence_id)
            if len(self._last) > MOST_SESSIONS:
                self._last.popitem(last=False)
        probabilities = tuple(-negative for negative, _, _ in chosen) if passes.has_probabilities else ()
        tree, origins = TokenTree(tuple(tokens), tuple(parents)), (DraftOrigin.TRAINED,) * len(tokens)
        return Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities, origins=origins)

    def _observe(self, row: DraftRow) -> None:
        """Compare the last draft of the sequence with the tokens that the target has decided since."""
        draft = self._last.get(row.sequence_id)
        if draft is None or row.base_len <= draft.base_len:
            return
        del self._last[row.sequence_id]
        if row.known_len > draft.base_len:
            return
        decided = row.new_tokens[draft.base_len - row.known_len :]
        for level, (found, token) in enumerate(zip(draft.levels, decided, strict=False)):
            drafted = [candidate for candidate, _ in found]
            taken = drafted.index(token) if token in drafted else None
            self._calibration.observe([confidence for _, confidence in found], taken, draft.kind(level))
            if taken != 0:
                return


def default_part(layers: int) -> TargetPart:
    """The part of a target with so many layers that drafts where nothing describes one."""
    return TargetPart(max(1, round(layers * _DEFAULT_SHARE)))


def part_of(settings: EarlyExitSettings, target: TargetSection) -> TargetPart | None:
    """The part that the settings or the module's card describe; `None` if nothing describes one.

    Raises `ModelLoadError` and `ConfigurationError` for a module that is not an exit of this target.
    """
    if not settings.path and not settings.has_part:
        return None
    if not settings.path:
        return TargetPart(settings.layers, frozenset(settings.skip_attention), frozenset(settings.skip_mlp))
    from workers.model.draft_card import WEIGHTS, read_card
    from workers.model.draft_shapes import ExitShape
    from workers.model.target_ends import read_config, read_tensors

    directory = Path(settings.path)
    card = read_card(directory)
    if not isinstance(card.shape, ExitShape):
        raise ConfigurationError(
            f"draft.early_exit.path: kind {card.kind!r} is refused; it must be {settings.draft_kind!r}"
        )
    config = read_config(Path(target.path)).get_text_config()
    last = card.shape.layers[-1] + 1
    if last > config.num_hidden_layers:
        raise ConfigurationError(
            f"draft.early_exit.path: layer {last - 1} is refused; the target has {config.num_hidden_layers} layers"
        )
    skipped = frozenset(range(last)) - set(card.shape.layers)
    norm = read_tensors(directory / WEIGHTS).get("weight") if card.shape.has_norm else None
    return TargetPart(last, skipped, skipped, () if norm is None else tuple(norm.float().tolist()))


@register("early_exit", EarlyExitSettings, places=Places(("target",), on_every_rank=True))
def create_early_exit(settings: EarlyExitSettings, draft: DraftSection, target: TargetSection) -> EarlyExitDrafter:
    """Create the method `early_exit`.

    Raises `ModelLoadError` and `ConfigurationError` for a module that is not an exit of this target.
    """
    return EarlyExitDrafter(settings, draft, part_of(settings, target))
