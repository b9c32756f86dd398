"""A drafter of Pilotfish that listens on a real socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from cluster.core.drafting import DescribedMethod, DraftRow, EvidenceNeeds, Proposal
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.wire.peer_access import OPEN, PeerAccess
from tests.support.models import tiny
from tests.support.models.draft_model import ReferenceModel
from workers.draft.registry import create
from workers.serve.configuration import load_configuration
from workers.serve.lease_servicer import Leases
from workers.serve.worker_server import WorkerHost, host_draft

MODEL = DescribedMethod("model", EvidenceNeeds())


class Counted:
    """A method whose calls are counted. While `gate` is closed, its proposals wait."""

    def __init__(self, method: DraftMethod) -> None:
        self._method = method
        self.held: set[SequenceId] = set()
        self.rows: list[DraftRow] = []
        self.gate = threading.Event()
        self.gate.set()

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self.gate.wait(10.0)
        self.rows += rows
        self.held.update(row.sequence_id for row in rows)
        return self._method.propose(rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self.held.difference_update(sequence_ids)
        self._method.release(sequence_ids)


class Served:
    """A context manager: inside, a drafter listens at `address`."""

    def __init__(
        self,
        method: DraftMethod,
        access: PeerAccess = OPEN,
        port: int = 0,
        described: DescribedMethod = MODEL,
        lease_seconds: float = 10.0,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._host: WorkerHost = host_draft(
            "127.0.0.1", method, access, leases=Leases(lease_seconds), described=[described]
        )
        self._port = port
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._host.start(self._port), self._loop).result(20.0)
        self.address = self._host.address
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._host.stop(), self._loop).result(20.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20.0)
        self._loop.close()


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, which is the target."""
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


@pytest.fixture(scope="package")
def target(directory: Path) -> ReferenceModel:
    return ReferenceModel(directory)


@pytest.fixture
def method(directory: Path, tmp_path: Path) -> Counted:
    """A draft model: the target with noise, so that drafts are often accepted and sometimes rejected."""
    draft = tiny.blur(directory, tmp_path / "draft", noise=0.05)
    model = {"path": str(draft), "candidates": 1, "width": 1, "mode": "serial", "device": "cpu"}
    values = {"target": {"path": str(directory)}, "draft": {"method": "model", "model": model}}
    configuration = load_configuration(values)
    return Counted(create(configuration.draft, configuration.target))


@pytest.fixture
def served(method: Counted) -> Iterator[Served]:
    with Served(method) as served:
        yield served
