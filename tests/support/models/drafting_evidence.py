"""Drafting methods, and the hidden states of a target that they draft from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.core.drafting import Evidence, HiddenStates
from cluster.core.ports import DraftMethod
from workers.draft.registry import create, needs_of
from workers.serve.configuration import load_configuration
from workers.verify.evidence import resolve_taps


def drafter_of(
    target: Path, layers: int, method: str, settings: Mapping[str, Any], **drafting: Any
) -> tuple[DraftMethod, tuple[int, ...]]:
    """A method for a target of so many layers, and the layers after which it reads hidden states."""
    draft = {"method": method, "controller": "off", method: {"weights": "float32", **settings}} | drafting
    values = {"target": {"path": str(target), "device": "cpu"}, "draft": draft}
    needs = needs_of(load_configuration(values).draft)
    configuration = load_configuration(values, {"target.evidence.taps": needs.taps})
    return create(configuration.draft, configuration.target), resolve_taps(needs.taps, layers)


def shown_states(states: Tensor, first: int = 0) -> Evidence:
    """Hidden states [tokens, width] from position `first` on, in bfloat16; of the token after them nothing is known."""
    data = states.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    return Evidence(first + len(states) + 1, hidden=HiddenStates(first, states.shape[1], data))
