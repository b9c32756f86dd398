"""Settings of drafting modules that keep keys and values made from the target's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from cluster.core.config.draft_section import DraftModuleSection
from workers.draft.parallel.settings import Weights
from workers.model.draft_card import read_card


class ContextModuleSettings(DraftModuleSection):
    """A module that was trained for the target, and the memory for its keys and values."""

    weights: Weights = "auto"
    """Type that the module's weights are multiplied in. `auto` is int8 on a CPU that multiplies integers (AMX, VNNI),
    else bfloat16."""
    sequences: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most sequences whose keys and values are kept. Beyond it, the least recently used one is sent again."""
    store_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1 << 15
    """Most tokens whose keys and values are kept for later sequences with the same beginning; 0 keeps none."""


def module_taps(settings: DraftModuleSection) -> tuple[int, ...]:
    """The taps that the module reads."""
    return settings.taps or read_card(Path(settings.path)).taps
