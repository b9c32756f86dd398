"""Fixtures: the models that the tests of the target engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.engine_rows import open_engine
from tests.support.models import tiny
from tests.support.models.model_cases import CONFIGURATIONS, USUAL_CONFIGURATIONS, ModelCase, gemma3, save_case
from tests.support.slow import slow_but
from workers.verify.engine import TargetEngine


@pytest.fixture(scope="module", params=slow_but(USUAL_CONFIGURATIONS, sorted(CONFIGURATIONS)))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return save_case(tmp_path_factory.mktemp(request.param), CONFIGURATIONS[request.param]())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return save_case(tmp_path_factory.mktemp("full"), tiny.llama())


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return save_case(tmp_path_factory.mktemp("hybrid"), gemma3())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with full attention."""
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


@pytest.fixture
def engine(directory: Path) -> TargetEngine:
    """An engine over that model."""
    return open_engine(directory)
