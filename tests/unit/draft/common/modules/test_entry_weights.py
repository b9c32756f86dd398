"""A public draft's weights in 8 or 4 bits lose no hidden state, whatever the sizes of the states that `fc` joins."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.support.models import public_drafts
from tests.support.models.public_drafts import DRAFTED, DSPARK, HIDDEN, LLAMA
from tests.support.models.shown_target import Shown, shown_target
from workers.draft.block.masked_pass import MaskedBlockPass
from workers.draft.common.modules.module_settings import Weights
from workers.draft.eagle.feature_pass import FeaturePass
from workers.model.drafting.files import Drafter, load_drafter
from workers.model.drafting.public import PublicModule

CPU = torch.device("cpu")
LAYERS, TOKENS = 8, 23
LARGER = 300.0
"""How much larger a hidden state is than the others."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return shown_target(tmp_path_factory.mktemp("target"), LAYERS, list(range(TOKENS)))


def read(loaded: Drafter, weights: Weights, taps: Tensor) -> Tensor:
    """What a draft keeps of the hidden states of a text."""
    assert isinstance(loaded.module, PublicModule)
    if loaded.card.kind == "eagle":
        return FeaturePass(loaded.module, loaded.ends, weights, scratch=TOKENS).features(taps)
    passes = MaskedBlockPass(loaded.module, loaded.ends, weights)
    return passes.context(taps, torch.arange(TOKENS)).values.flatten(1)


@pytest.mark.parametrize("weights", get_args(Weights))
@pytest.mark.parametrize("kind", ["eagle", "block"])
@pytest.mark.parametrize("large", [0, 2])
def test_a_hidden_state_that_is_larger_than_others_is_read(
    kind: str, weights: Weights, large: int, shown: Shown, tmp_path: Path
) -> None:
    """Training gives its columns small weights. In one scale with the others, they would be zeros."""
    config, tensors = LLAMA | {"draft_vocab_size": len(DRAFTED)}, public_drafts.eagle3()
    if kind == "block":
        config, tensors = DSPARK, public_drafts.spark()
    columns = torch.ones(3, HIDDEN)
    columns[large] = LARGER
    fc = next(name for name in tensors if name.endswith("fc.weight"))
    tensors[fc] = tensors[fc] / columns.flatten()
    loaded = load_drafter(public_drafts.write(tmp_path, config, tensors), shown.directory, torch.float32, CPU, kind)
    states = torch.randn(TOKENS, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    wanted = read(loaded, "float32", states * columns)

    found = read(loaded, weights, states * columns)

    assert (found - wanted).norm() < 0.1 * wanted.norm()
