"""A public draft that a training goes on with, in the place of a new one that begins as layers of the target."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.model.draft_card import DraftDescription
from workers.model.formats.registry import DraftWeights, read_draft, read_weights
from workers.model.public_shapes import FeatureShape, MaskedBlockShape

_OPTION = "--start"


@dataclass(frozen=True, slots=True)
class BegunDraft:
    """A draft that is trained further. It keeps its shape, its taps and its vocabulary."""

    card: DraftDescription
    weights: DraftWeights
    taps: tuple[int, ...]
    vocabulary: tuple[int, ...]
    """The tokens that it can propose, ascending; empty for all."""

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """The draft's own parameters by name, in float32."""
        return {name: value.to(device, torch.float32) for name, value in self.weights.tensors.items()}

    def head(self, whole: Tensor) -> Tensor:
        """The draft's output matrix [draft vocabulary, hidden size], on the device of `whole`, the target's.

        Without a matrix of its own, it is the rows of `whole` for the draft's vocabulary.
        """
        if self.weights.head is not None:
            return self.weights.head.to(whole.device, whole.dtype)
        return whole if not self.vocabulary else whole[torch.tensor(self.vocabulary, device=whole.device)]


def content_digest(directory: Path) -> str:
    """A hash of all files of a draft."""
    digest = blake2b(digest_size=16)
    for file in sorted(one for one in directory.iterdir() if one.is_file()):
        with file.open("rb") as opened:
            digest.update(f"{file.name}\n".encode() + file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def begun_card(directory: Path, kind: type[FeatureShape] | type[MaskedBlockShape], config: Any) -> DraftDescription:
    """Describe a draft that a training can change. The parameters and errors are those of `begun_draft`."""
    card = read_draft(directory)
    size, vocabulary = int(config.hidden_size), int(config.vocab_size)
    wanted = "an EAGLE-3 head of one Llama layer" if kind is FeatureShape else "a DSpark drafter of Qwen3 layers"
    shape = card.shape
    if not isinstance(shape, kind) or not shape.is_trainable:
        raise ConfigurationError(f"{_OPTION} {directory}: a draft of kind {card.kind} is refused; it must be {wanted}")
    if (card.hidden_size, card.target_vocabulary_size or vocabulary) != (size, vocabulary):
        raise ConfigurationError(
            f"{_OPTION} {directory}: refused for this target; it is for one with a hidden size of {card.hidden_size} "
            f"and {card.target_vocabulary_size} tokens, and the target has {size} and {vocabulary}"
        )
    return card


def begun_draft(directory: Path, kind: type[FeatureShape] | type[MaskedBlockShape], config: Any) -> BegunDraft:
    """Read a draft in any public format that a training can change.

    `config` is the target's configuration of `transformers`. Raises `ModelLoadError` for a broken draft, and
    `ConfigurationError` for one of another kind, for another target, or with parts that no training here changes.
    """
    card = begun_card(directory, kind, config)
    taps = tuple(tap for tap in card.taps if isinstance(tap, int) and tap >= 0)
    count = int(config.num_hidden_layers)
    if len(taps) < len(card.taps) or list(taps) != sorted(set(taps)) or max(taps) > count:
        raise ConfigurationError(
            f"{_OPTION} {directory}: its hidden states {list(card.taps)} are refused; they must be ascending layers, "
            f"{count} at most"
        )
    weights = read_weights(directory, card)
    if weights.embedding is not None:
        raise ConfigurationError(
            f"{_OPTION} {directory}: an embedding of its own is refused; the training reads the target's"
        )
    known = () if weights.vocabulary is None else tuple(weights.vocabulary.tolist())
    return BegunDraft(card, weights, taps, known)
