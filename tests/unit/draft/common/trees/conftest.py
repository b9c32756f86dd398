"""A drafter over fake models, which holds no memory in the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines.tree_drafter import DrafterHarness


@pytest.fixture
def serial() -> Iterator[DrafterHarness]:
    made = DrafterHarness()
    yield made
    made.release_all()
    assert made.expander.memory.blocks_held == 0
