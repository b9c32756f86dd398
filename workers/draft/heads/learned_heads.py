"""The weights that heads draft with: those of the draft's files, and learned ones for the requests of some salts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cluster.core.errors import ModelLoadError
from workers.draft.common.learning import salt_key
from workers.model.draft_card import VOCABULARY, DraftCard, DraftDescription, read_card
from workers.model.drafting.files import save_own, stored_tensors
from workers.model.drafting.heads import MedusaHeads

ReplaceableType = TypeVar("ReplaceableType", bound="Replaceable")


class Replaceable(Protocol):
    """Heads that can be made anew with other weights."""

    def with_weights(self: ReplaceableType, module: MedusaHeads) -> ReplaceableType:
        """Heads that compute with the weights of `module`, and share what is the target's with these."""
        ...


class LearnedHeads(Generic[ReplaceableType]):
    """Heads by the key of a salt. It is a `LearnedWeights`, which another thread may call while `of_salt` runs."""

    def __init__(
        self, heads: ReplaceableType, module: MedusaHeads, card: DraftDescription, vocabulary: Tensor | None
    ) -> None:
        """`heads` compute with the weights of `module`, whose `vocabulary` [tokens] may be reduced."""
        self._heads = heads
        self._module = module
        self._vocabulary = None if vocabulary is None else vocabulary.cpu().long()
        self._card = DraftCard(
            card.target,
            card.target_vocabulary_size,
            card.hidden_size,
            card.layers,
            card.vocabulary_size,
            kind=card.kind,
            taps=tuple(tap for tap in card.taps if isinstance(tap, int)),
            shape=module.shape,
            tree=card.tree,
        )
        self._learned: dict[str, tuple[MedusaHeads, ReplaceableType]] = {}

    def of_salt(self, salt: str) -> ReplaceableType:
        """The heads that draft for the requests of a salt."""
        learned = self._learned
        found = learned.get(salt_key(salt)) if learned else None
        return self._heads if found is None else found[1]

    def of(self, key: str) -> Mapping[str, Tensor]:
        """The parameters by name, float32, that draft for the requests of a salt with this key."""
        module = self._learned[key][0] if key in self._learned else self._module
        return {name: value.float().cpu() for name, value in module.state_dict().items()}

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` for parameters of other names or shapes, or with values that are not finite."""
        wanted = {name: value.shape for name, value in self._module.state_dict().items()}
        if {name: value.shape for name, value in weights.items()} != wanted:
            raise ValueError(f"weights: {sorted(weights)} must have the names and shapes of the module's")
        if not all(bool(value.isfinite().all()) for value in weights.values()):
            raise ValueError("weights: every value must be finite")

    def replace(self, key: str, weights: Mapping[str, Tensor] | None) -> None:
        """Draft with these parameters for the requests of one salt, or with those of the files; see `LearnedWeights`.

        Raises `ValueError` as `check` does.
        """
        learned = {other: heads for other, heads in self._learned.items() if other != key}
        if weights is not None:
            self.check(weights)
            module = self._filled(weights)
            learned[key] = (module, self._heads.with_weights(module))
        self._learned = learned  # at once, because `of_salt` reads it in another thread

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a draft of these parameters, with its card, into an existing directory. Raises `OSError`."""
        save_own(directory, self._card, self._filled(weights), self._vocabulary, int8=False)

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """The parameters of a draft that `save` wrote, float32; see `LearnedWeights`."""
        try:
            card, tensors = read_card(directory), stored_tensors(directory)
        except ModelLoadError as error:
            raise ValueError(str(error)) from None
        vocabulary, own = tensors.pop(VOCABULARY, None), self._vocabulary
        is_same = vocabulary is own if vocabulary is None or own is None else torch.equal(vocabulary.long(), own)
        if card != self._card or not is_same:
            raise ValueError(f"{directory}: the draft there has another target, other sizes or another vocabulary")
        weights = {name: value.float() for name, value in tensors.items()}
        self.check(weights)
        return weights

    def _filled(self, weights: Mapping[str, Tensor]) -> MedusaHeads:
        filled = deepcopy(self._module)
        filled.load_state_dict(weights)
        return filled
