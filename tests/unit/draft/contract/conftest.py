"""The models of the contract's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.draft.contract.methods import Directories, example_method, make_directories


@pytest.fixture(scope="package", autouse=True)
def _example() -> Iterator[None]:
    """The method that CONTRIBUTING shows is registered."""
    with example_method():
        yield


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return make_directories(tmp_path_factory.mktemp("contract"))
