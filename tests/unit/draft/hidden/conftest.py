"""A tiny target and random modules for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import drafting_modules, tiny

VOCABULARY = range(0, 96, 2)
"""Tokens that the modules can propose."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


@pytest.fixture(scope="session")
def modules(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random module of each kind."""
    directory = tmp_path_factory.mktemp("modules")
    for kind in ("block", "eagle"):
        drafting_modules.save(target, directory / kind, kind, vocabulary=VOCABULARY)
    return directory
