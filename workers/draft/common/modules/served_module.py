"""Loads a drafting module for serving, with the target's ends and the ranking of its candidates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch

from cluster.core.config.target_section import TargetSection
from workers.draft.common.modules.module_settings import ModuleSettings, Weights
from workers.draft.common.modules.product import MakeProduct, entry_weights, make_product
from workers.draft.common.modules.shortlist import Shortlist
from workers.forward.native.largest import load_largest
from workers.model.devices import choose_device
from workers.model.draft_card import DraftDescription
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import load_drafter

_COUPLED = "coupled"
"""The acceptance rule with which sampled candidates are ranked by the target's own noise."""

ModuleType = TypeVar("ModuleType")


@dataclass(frozen=True, slots=True)
class ServedModule(Generic[ModuleType]):
    """A module that was trained for the target."""

    settings: ModuleSettings
    module: ModuleType
    card: DraftDescription
    ends: TargetEnds
    make: MakeProduct
    """Makes products with weights in the type of the settings."""
    make_entry: MakeProduct
    """Makes products that read hidden states or embeddings without a norm; see `entry_weights`."""
    shortlist: Shortlist
    """Ranks the candidates of rows of logits."""


def computed_type(weights: Weights) -> torch.dtype:
    """The data type that a module with these weights is loaded in, and that its keys and values are kept in."""
    return torch.float32 if weights == "float32" else torch.bfloat16


def load_served_module(
    settings: ModuleSettings, target: TargetSection, kind: str, expected: tuple[type[ModuleType], ...]
) -> ServedModule[ModuleType]:
    """Load the module of this kind that the settings name; its class must be one of `expected`.

    Raises `ModelLoadError`, and `ConfigurationError` without the device.
    """
    device, weights = choose_device(target.device, 0), settings.weights
    loaded = load_drafter(
        Path(settings.path), Path(target.path), computed_type(weights), device, kind, taps=settings.taps
    )
    if not isinstance(loaded.module, expected):
        raise TypeError(f"{type(loaded.module).__name__} is no module of the kind {kind}")
    make = partial(make_product, directory=target.compile_directory)
    return ServedModule(
        settings,
        loaded.module,
        loaded.card,
        loaded.ends,
        partial(make, weights=weights),
        partial(make, weights=entry_weights(weights)),
        make_shortlist(loaded.ends.vocabulary, target, device),
    )


def make_shortlist(vocabulary: torch.Tensor | None, target: TargetSection, device: torch.device) -> Shortlist:
    """The ranking of the candidates of rows of logits, which are those of the tokens of `vocabulary`, or of all."""
    largest = load_largest(device, target.compile_directory)
    return Shortlist(vocabulary, knows_noise=target.acceptance == _COUPLED, largest=largest)
