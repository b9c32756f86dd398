"""The weights that drafts are made with: those of the draft's files, and learned ones for requests of some salts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cluster.core.errors import ModelLoadError
from workers.draft.common.learning import LearnedWeights, Reservoir, salt_key
from workers.draft.common.modules.pass_of_salt import PassOfSalt, PassType_co
from workers.draft.common.modules.served_module import ServedModule
from workers.draft.common.modules.text_collector import TextCollector
from workers.model.drafting.files import (
    ModuleType,
    parameters_of,
    save_with_parameters,
    saved_bytes,
    with_parameters,
)
from workers.model.formats.registry import read_draft, read_weights

StoredType = TypeVar("StoredType")
"""What holds parameters in memory: a module, or a mapping."""


class _Learned(NamedTuple, Generic[StoredType, PassType_co]):
    """Learned weights of one salt."""

    stored: StoredType
    served: PassType_co


class LearnedPasses(PassOfSalt[PassType_co], ABC, Generic[PassType_co, StoredType]):
    """Passes by the key of a salt. It is a `LearnedWeights`, which another thread may call while passes run."""

    def __init__(
        self, own: PassType_co, stored: StoredType, source: Path, make: Callable[[StoredType], PassType_co]
    ) -> None:
        """`own` computes with the weights in `stored`, those of the draft in the directory `source`.

        `make` makes a pass with other weights, which shares what it can with `own`.
        """
        super().__init__(own)
        self._stored: StoredType = stored
        self._source = source
        self._make: Callable[[StoredType], PassType_co] = make
        self._learned: dict[str, _Learned[StoredType, PassType_co]] = {}
        self._versions: dict[str, int] = {}
        """By key of a salt whose weights were replaced. No number is given twice."""

    @property
    @abstractmethod
    def bytes_each(self) -> int:
        """Most memory that the learned weights of one salt take, in bytes."""

    @property
    def saved_bytes(self) -> int:
        """Most bytes of the files that `save` writes; see `LearnedWeights`."""
        try:
            return saved_bytes(self._source, self._parameters(self._stored))
        except ModelLoadError as error:
            raise ValueError(str(error)) from None

    @abstractmethod
    def _parameters(self, stored: StoredType) -> Mapping[str, Tensor]:
        """The parameters by name, in any type and on any device."""

    @abstractmethod
    def _with_parameters(self, weights: Mapping[str, Tensor]) -> StoredType:
        """What holds these parameters."""

    @abstractmethod
    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """The parameters of a draft that `save` wrote, float32; see `LearnedWeights`."""

    def of_salt(self, salt: str) -> PassType_co:
        """The pass that drafts for the requests of a salt."""
        found = self._of_salt(salt)
        return self.own if found is None else found.served

    def version(self, salt: str) -> int:
        """A number of the weights of that pass; see `PassOfSalt.version`."""
        versions = self._versions
        return versions.get(salt_key(salt), 0) if versions else 0

    def of(self, key: str) -> Mapping[str, Tensor]:
        """The parameters by name, float32, that draft for the requests of a salt with this key."""
        stored = self._learned[key].stored if key in self._learned else self._stored
        return {name: value.float().cpu() for name, value in self._parameters(stored).items()}

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` for parameters of other names or shapes, or with values that are not finite."""
        wanted = {name: value.shape for name, value in self._parameters(self._stored).items()}
        if {name: value.shape for name, value in weights.items()} != wanted:
            raise ValueError(f"weights: {sorted(weights)} must have the names and shapes of the draft's")
        if not all(bool(value.isfinite().all()) for value in weights.values()):
            raise ValueError("weights: every value must be finite")

    def replace(self, key: str, weights: Mapping[str, Tensor] | None) -> None:
        """Draft with these parameters for the requests of one salt, or with those of the files; see `LearnedWeights`.

        Raises `ValueError` as `check` does.
        """
        learned = {other: one for other, one in self._learned.items() if other != key}
        if weights is not None:
            self.check(weights)
            stored = self._with_parameters(weights)
            learned[key] = _Learned(stored, self._make(stored))
        are_others = weights is not None or key in self._learned
        self._learned = learned  # at once, because `of_salt` reads it in another thread
        if are_others:
            self._versions = self._versions | {key: 1 + max(self._versions.values(), default=0)}

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a draft of these parameters into an existing directory; see `LearnedWeights`."""
        try:
            save_with_parameters(self._source, directory, weights)
        except ModelLoadError as error:
            raise ValueError(str(error)) from None

    def _of_salt(self, salt: str) -> _Learned[StoredType, PassType_co] | None:
        learned = self._learned
        return learned.get(salt_key(salt)) if learned else None


class LearnedModules(LearnedPasses[PassType_co, ModuleType], Generic[PassType_co, ModuleType]):
    """The weights of a drafting module."""

    def __init__(
        self, own: PassType_co, module: ModuleType, loaded: ServedModule[Any], make: Callable[[ModuleType], PassType_co]
    ) -> None:
        """`own` computes with the weights of `module`, which was loaded as `loaded`.

        `make` makes a pass with other weights, which shares what is the target's with `own`.
        """
        super().__init__(own, module, Path(loaded.settings.path), make)
        vocabulary = loaded.ends.vocabulary
        self._vocabulary = None if vocabulary is None else vocabulary.cpu().long()
        self._card, self._taps = loaded.card, loaded.settings.taps

    @property
    def bytes_each(self) -> int:
        """Most memory that the learned weights of one salt take: as they were trained, and as a pass computes."""
        return 2 * sum(4 * value.numel() for value in parameters_of(self._stored).values())

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        try:
            card = read_draft(directory, self._taps)
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

    def _parameters(self, stored: ModuleType) -> Mapping[str, Tensor]:
        return parameters_of(stored)

    def _with_parameters(self, weights: Mapping[str, Tensor]) -> ModuleType:
        return with_parameters(self._stored, weights)


class LearningDrafter:
    """What drafters have in common whose weights can be learned: all of a `LearnsOnline` but the drafting."""

    _passes: PassOfSalt[Any]
    _collector: TextCollector

    @property
    def weights(self) -> LearnedWeights | None:
        """The weights, where they can be replaced."""
        return self._passes if isinstance(self._passes, LearnedPasses) else None

    @property
    def default_text_bytes(self) -> int:
        """Memory for texts where the settings do not say how much, in bytes."""
        return self._collector.default_bytes

    def collect_into(self, reservoir: Reservoir) -> None:
        self._collector.collect_into(reservoir)

    def ignore_times(self) -> None:
        """Nothing: what is ranked at once does not depend on times."""
