"""Fixtures of a tiny draft model, and of modules that draft from the hidden states of a tiny target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from tests.support.models import drafting_modules, tiny
from tests.support.models.draft_model import CONTEXT, DraftModelHarness, ReferenceModel
from workers.forward.loaded_model import LoadedModel
from workers.model.loading import load_model

DRAFT_VOCABULARY = range(0, 96, 2)
"""Tokens that the modules can propose."""


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


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


@pytest.fixture(scope="session")
def modules(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random module of each kind that keeps a context."""
    directory = tmp_path_factory.mktemp("modules")
    for kind in ("block", "eagle"):
        drafting_modules.save(target, directory / kind, kind, vocabulary=DRAFT_VOCABULARY)
    return directory
