"""A tiny target with a random block drafter, and its drafter for serving."""

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
def block_directory(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("block")
    drafting_modules.save(target, directory, "block", vocabulary=VOCABULARY)
    return directory
