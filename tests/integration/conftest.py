"""The packaged model, a draft that agrees with it often but not always, and what the model alone would write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.errors import ModelLoadError
from deploy.settings import read
from tests import tiny
from tests.integration.serving import Reference
from workers.model.weights import resolve_model_directory


@pytest.fixture(scope="session")
def target_directory() -> Path:
    """SmolLM2-135M-Instruct, as `make setup` prepared it."""
    try:
        return resolve_model_directory("smollm2-135m-instruct", read().cache_directory)
    except ModelLoadError as error:
        pytest.fail(f"run `make setup` first: {error}")


@pytest.fixture(scope="session")
def draft_directory(target_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights with noise: right often enough to be accepted, wrong often enough to be rejected."""
    return tiny.blur(target_directory, tmp_path_factory.mktemp("draft"), noise=0.08)


@pytest.fixture(scope="session")
def reference(target_directory: Path) -> Reference:
    """`transformers` by itself."""
    torch.set_num_threads(2)
    return Reference(target_directory)
