"""The final norm that a draft shares with its target is a plain RMS norm, or none is shared."""

from __future__ import annotations

import pytest

from tests.zoo.configs import tiny_config
from workers.model.target_ends import outline


@pytest.mark.parametrize(
    ("family", "norm"),
    [("llama", "model.norm"), ("granitemoehybrid", "model.norm"), ("gemma", None), ("qwen3_next", None)],
)
def test_a_norm_that_multiplies_by_one_plus_its_weight_is_not_shared(family: str, norm: str | None) -> None:
    assert outline(tiny_config(family)).norm == norm
