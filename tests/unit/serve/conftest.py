"""Fixtures for the tests of the servicers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.fakes.echo_workers import EchoDrafter, Gate
from tests.support.models import tiny
from workers.serve.draft_servicer import DraftServicer


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
async def held(gate: Gate) -> AsyncIterator[tuple[DraftServicer, EchoDrafter]]:
    """A drafter that waits at the gate in every `propose` call."""
    method = EchoDrafter(gate.pass_through)
    servicer = DraftServicer(method)
    yield servicer, method
    gate.opened.set()
    await servicer.close()


class HeldRunAhead(EchoDrafter):
    """A drafter that waits at the gate in every piece of idle work."""

    def __init__(self, gate: Gate, passes_left: int) -> None:
        super().__init__(passes_left=passes_left)
        self._held_at = gate

    def run_ahead(self) -> bool:
        self._held_at.pass_through()
        return super().run_ahead()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())
