"""The longest sequence of a model is what its configuration states, stretched by YaRN as engines stretch it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from tests.support.models import tiny
from workers.model.context import context_len, longest_context

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}


def config(**rotations: Any) -> Any:
    return tiny.llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rotations)


@pytest.mark.parametrize(
    ("rotations", "length"),
    [
        ({}, 256),
        (YARN | {"original_max_position_embeddings": 128}, 512),  # as the pages of Qwen say to set it
        (YARN | {"original_max_position_embeddings": 64}, 256),  # the stated length is the stretched one
        (YARN | {"factor": None, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
    ],
)
def test_a_context_is_as_long_as_yarn_stretches_it(rotations: dict[str, Any], length: int) -> None:
    assert longest_context(config(**rotations)) == length
    assert context_len(config(**rotations), None, {}) == length
    assert context_len(config(**rotations), length, {}) == length
    with pytest.raises(ConfigurationError, match=rf"{length + 1} is refused; the model's limit is {length}"):
        context_len(config(**rotations), length + 1, {})
