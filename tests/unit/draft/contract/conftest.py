"""The models of the contract's tests."""

from __future__ import annotations

import pytest

from tests.unit.draft.contract.methods import Directories, make_directories


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return make_directories(tmp_path_factory.mktemp("contract"))
