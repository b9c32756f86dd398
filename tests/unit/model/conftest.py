"""Fixtures: tiny Marian and BART models that the CPU kernels compute, with several activations and scales."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny

_CONFIGS = {
    "marian": tiny.marian(),
    "relu": tiny.marian(activation_function="relu", scale_embedding=False),
    "bart": tiny.bart(activation_function="gelu", scale_embedding=True),
}


@pytest.fixture(scope="package", params=sorted(_CONFIGS))
def sourced_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp(request.param), _CONFIGS[request.param])
