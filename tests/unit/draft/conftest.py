"""Fixtures of a tiny draft model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from tests.support.models import tiny
from tests.support.models.draft_model import CONTEXT, DraftModelHarness, ReferenceModel
from workers.forward.loaded_model import LoadedModel
from workers.model.loading import load_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("draft"), tiny.llama(max_position_embeddings=CONTEXT))


@pytest.fixture(scope="session")
def loaded(directory: Path) -> LoadedModel:
    return load_model(ModelSection(path=str(directory), device="cpu"))


@pytest.fixture(scope="session")
def reference(directory: Path) -> ReferenceModel:
    return ReferenceModel(directory)


@pytest.fixture
def harness(loaded: LoadedModel) -> Iterator[DraftModelHarness]:
    harness = DraftModelHarness(loaded)
    yield harness
    harness.release_all()
    assert harness.blocks_held == 0
