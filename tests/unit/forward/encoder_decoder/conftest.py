"""Fixtures: one tiny model of each encoder-decoder family."""

from __future__ import annotations

import pytest

from tests.support.engines.sourced import SourcedModel
from tests.support.models import tiny
from tests.support.slow import slow_but


@pytest.fixture(scope="package", params=slow_but(("marian", "t5"), sorted(tiny.ENCODER_DECODER_FAMILIES)))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourcedModel:
    config = tiny.ENCODER_DECODER_FAMILIES[request.param]()
    return SourcedModel(tiny.save(tmp_path_factory.mktemp(request.param), config))


@pytest.fixture(scope="package")
def marian(tmp_path_factory: pytest.TempPathFactory) -> SourcedModel:
    return SourcedModel(tiny.save(tmp_path_factory.mktemp("marian"), tiny.marian()))
