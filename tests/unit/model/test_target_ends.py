"""The final norm that a draft shares with its target is an RMS norm, or none is shared."""

from __future__ import annotations

import pytest

from tests.zoo.configs import tiny_config
from workers.model.target_ends import outline


@pytest.mark.parametrize(
    ("family", "norm", "offset"),
    [
        ("llama", "model.norm", 0.0),
        ("granitemoehybrid", "model.norm", 0.0),
        ("gemma", None, 0.0),
        ("qwen3_next", "model.norm", 1.0),
        ("qwen3_5_text", "model.norm", 1.0),
    ],
)
def test_a_norm_that_multiplies_by_one_plus_its_weight_says_so(family: str, norm: str | None, offset: float) -> None:
    found = outline(tiny_config(family))
    assert (found.norm, found.norm_offset) == (norm, offset)
