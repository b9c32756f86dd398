"""A draft model that learns while it drafts: the layers of its files, and learned ones for requests of some salts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ModelLoadError, PilotfishError
from workers.draft.common.learning import CollectedText, LearnedWeights, Reservoir
from workers.draft.common.modules.learned_modules import LearnedPasses
from workers.draft.common.modules.pass_of_salt import ValueOfSalt
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.expander import DraftedToken, ExpansionRow
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.common.trees.tree_session import TreeSession
from workers.draft.model.model_expander import ModelExpander
from workers.kv.pool import KvPool
from workers.model.decoder_copies import DecoderCopies
from workers.model.draft_card import CARD, VOCABULARY, DraftCard, is_distilled, read_card
from workers.model.formats.checkpoint import Checkpoint
from workers.model.weight_files import config_values

_TEXT_BYTES = 64 << 20
"""Default memory for texts: tokens alone."""


class LearnedModels(LearnedPasses[ModelExpander, Mapping[str, Tensor]]):
    """The weights of a draft model's layers. Its embedding and its head stay as they are."""

    def __init__(
        self,
        own: ModelExpander,
        stored: Mapping[str, Tensor],
        copies: DecoderCopies,
        section: ModelSection,
        count: int,
    ) -> None:
        """`own` computes with the weights of the draft's files, `stored`.

        `count` candidates are drafted below each node.
        """
        make = partial(_expander, copies, own.memory, count)
        super().__init__(own, stored, Path(section.path), make)
        self._copies = copies

    @property
    def bytes_each(self) -> int:
        return self._copies.bytes_each

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        try:
            is_same = _description(directory) == _description(self._source)
            weights = self._copies.stored_weights(directory)
        except ModelLoadError as error:
            raise ValueError(str(error)) from None
        if not is_same:
            raise ValueError(f"{directory}: the draft there has another target, other sizes or another vocabulary")
        self.check(weights)
        return {name: value.float() for name, value in weights.items()}

    def _parameters(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return stored

    def _with_parameters(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: value.bfloat16() for name, value in weights.items()}


def _expander(copies: DecoderCopies, pool: KvPool, count: int, weights: Mapping[str, Tensor]) -> ModelExpander:
    """An expander with these weights. Raises `RuntimeError` for a model that cannot be made."""
    try:
        return ModelExpander(copies.make(weights), pool, count)
    except PilotfishError as error:
        raise RuntimeError(str(error)) from error


def _description(directory: Path) -> tuple[dict[str, Any], DraftCard | None, list[int]]:
    """What a draft's directory says of it: its configuration, its card if it has one, and its reduced vocabulary."""
    config = {key: value for key, value in config_values(directory).items() if key != CARD}
    card = read_card(directory) if is_distilled(directory) else None
    found = Checkpoint(directory, {}).tensors({VOCABULARY})
    return config, card, found[VOCABULARY].tolist() if found else []


class LearnedExpander:
    """Expands the nodes of each row with the weights of its salt. It is an `Expander`."""

    def __init__(self, models: LearnedModels) -> None:
        self._models = models
        self.memory = models.own.memory
        self.max_context_len = models.own.max_context_len
        self.vocabulary_size = models.own.vocabulary_size

    def expand(self, rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        found: dict[int, tuple[DraftedToken, ...]] = {}
        for expander, group in self._models.groups(enumerate(rows), lambda one: one[1].start.cache_salt):
            drafted = expander.expand([row for _, row in group])
            found |= {index: tokens for (index, _), tokens in zip(group, drafted, strict=True)}
        return [found[index] for index in range(len(rows))]


class LearningTreeDrafter(TreeDrafter):
    """Drafts trees with a draft model that learns. It is a `LearnsOnline`.

    Weights that replace others draft from the next call on. What a sequence has stored of the former weights is dropped
    then, and its tokens go through the model again: keys of one model and queries of another would draft worse.
    """

    def __init__(self, models: LearnedModels, settings: ExpansionSettings, draft: DraftSection) -> None:
        super().__init__(LearnedExpander(models), settings, draft)
        self._models = models
        self._calibrations = ValueOfSalt(models, Calibration)
        """How often the target takes what learned weights draft."""
        self._reservoir: Reservoir | None = None

    @property
    def weights(self) -> LearnedWeights:
        """The weights, which can be replaced."""
        return self._models

    @property
    def default_text_bytes(self) -> int:
        """Memory for texts where the settings do not say how much, in bytes."""
        return _TEXT_BYTES

    def collect_into(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir

    def ignore_times(self) -> None:
        self._cost.is_free = True

    def _prepare(self, session: TreeSession) -> None:
        """Drop what was computed for the sequence with other weights than those that draft for it now."""
        salt = session.start.cache_salt
        version = self._models.version(salt)
        if version != session.weights:
            session.evict()
            session.weights = version
            is_own = self._models.of_salt(salt) is self._models.own
            session.tree.calibration = self._calibration if is_own else self._calibrations.of_salt(salt)

    def _discard(self, session: TreeSession) -> None:
        start, tokens = session.start, tuple(session.tokens)
        if self._reservoir is not None and len(tokens) > start.prompt_len + 1:
            # A draft model reads no hidden states of the target: rows without values.
            states = torch.empty((len(tokens) - 1, 0), dtype=torch.bfloat16)
            self._reservoir.add(CollectedText(start, tokens, 0, states))
        super()._discard(session)
