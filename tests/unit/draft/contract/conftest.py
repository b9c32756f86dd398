"""The models of the contract's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.unit.draft.contract.methods import Directories, example_method, make_directories


@pytest.fixture(scope="package", autouse=True)
def _example() -> Iterator[None]:
    """The method that CONTRIBUTING shows is registered."""
    with example_method():
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Directories]:
    """The tiny models of a family, which are made once."""
    return cache(lambda family: make_directories(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def directories(models: Callable[[str], Directories]) -> Directories:
    return models("llama")
