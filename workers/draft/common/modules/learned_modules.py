"""The weights that a module drafts with: those of the draft's files, and learned ones for requests of some salts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cluster.core.errors import ModelLoadError
from workers.draft.common.learning import salt_key
from workers.draft.common.modules.served_module import ServedModule
from workers.model.draft_card import DraftCard, read_card
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.files import save_own
from workers.model.drafting.heads import MedusaHeads
from workers.model.formats.registry import read_weights

PassType_co = TypeVar("PassType_co", covariant=True)
RowType = TypeVar("RowType")
ModuleType = TypeVar("ModuleType", MedusaHeads, EagleHead)


class PassOfSalt(Generic[PassType_co]):
    """The pass that drafts for the requests of a salt: one for all."""

    def __init__(self, own: PassType_co) -> None:
        """`own` computes with the weights of the draft's files."""
        self.own = own

    def of_salt(self, salt: str) -> PassType_co:  # noqa: ARG002 - one for all
        """The pass that drafts for the requests of a salt."""
        return self.own

    def version(self, salt: str) -> int:  # noqa: ARG002
        """A number of the weights of that pass: 0 for those of the draft's files, and never one of former weights."""
        return 0

    def groups(
        self, rows: Iterable[RowType], salt_of: Callable[[RowType], str]
    ) -> list[tuple[PassType_co, list[RowType]]]:
        """The rows in order, those with the same pass together."""
        found: dict[int, tuple[PassType_co, list[RowType]]] = {}
        for row in rows:
            one = self.of_salt(salt_of(row))
            found.setdefault(id(one), (one, []))[1].append(row)
        return list(found.values())


class _Learned(NamedTuple, Generic[ModuleType, PassType_co]):
    """Learned weights of one salt."""

    module: ModuleType
    served: PassType_co
    version: int


class LearnedModules(PassOfSalt[PassType_co], Generic[PassType_co, ModuleType]):
    """Passes by the key of a salt. It is a `LearnedWeights`, which another thread may call while passes run."""

    def __init__(
        self, own: PassType_co, module: ModuleType, loaded: ServedModule[Any], make: Callable[[ModuleType], PassType_co]
    ) -> None:
        """`own` computes with the weights of `module`, which was loaded as `loaded`.

        `make` makes a pass with other weights, which shares what is the target's with `own`.
        """
        super().__init__(own)
        self._module: ModuleType = module
        self._make: Callable[[ModuleType], PassType_co] = make
        vocabulary, card = loaded.ends.vocabulary, loaded.card
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
        self._learned: dict[str, _Learned[ModuleType, PassType_co]] = {}
        self._replaced = 0
        """How often weights were replaced."""

    def of_salt(self, salt: str) -> PassType_co:
        """The pass that drafts for the requests of a salt."""
        found = self._of_salt(salt)
        return self.own if found is None else found.served

    def version(self, salt: str) -> int:
        """A number of the weights of that pass; see `PassOfSalt.version`."""
        found = self._of_salt(salt)
        return 0 if found is None else found.version

    def of(self, key: str) -> Mapping[str, Tensor]:
        """The parameters by name, float32, that draft for the requests of a salt with this key."""
        module = self._learned[key].module if key in self._learned else self._module
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
        learned = {other: one for other, one in self._learned.items() if other != key}
        if weights is not None:
            self.check(weights)
            module = self._filled(weights)
            self._replaced += 1
            learned[key] = _Learned(module, self._make(module), self._replaced)
        self._learned = learned  # at once, because `of_salt` reads it in another thread

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a draft of these parameters, with its card, into an existing directory. Raises `OSError`."""
        save_own(directory, self._card, self._filled(weights), self._vocabulary, int8=False)

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """The parameters of a draft that `save` wrote, float32; see `LearnedWeights`."""
        try:
            card = read_card(directory)
            found = read_weights(directory, card)
        except ModelLoadError as error:
            raise ValueError(str(error)) from None
        vocabulary, own = found.vocabulary, self._vocabulary
        is_same = vocabulary is own if vocabulary is None or own is None else torch.equal(vocabulary, own)
        if card != self._card or not is_same:
            raise ValueError(f"{directory}: the draft there has another target, other sizes or another vocabulary")
        weights = {name: value.float() for name, value in found.tensors.items()}
        self.check(weights)
        return weights

    def _of_salt(self, salt: str) -> _Learned[ModuleType, PassType_co] | None:
        learned = self._learned
        return learned.get(salt_key(salt)) if learned else None

    def _filled(self, weights: Mapping[str, Tensor]) -> ModuleType:
        filled: ModuleType = deepcopy(self._module)
        filled.load_state_dict(weights)
        return filled
