"""A tiny target, and what it computes for one text."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.shown_target import Shown, shown_target

LAYERS, KNOWN, STEPS = 8, 23, 4
TOKENS = [int(one) for one in torch.randint(0, 96, (KNOWN + STEPS + 1,), generator=torch.Generator().manual_seed(4))]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A target and its hidden states over `TOKENS[:KNOWN]`."""
    return shown_target(tmp_path_factory.mktemp("target"), LAYERS, TOKENS[:KNOWN])
