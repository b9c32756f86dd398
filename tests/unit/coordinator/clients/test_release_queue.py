"""The release queue repeats what failed."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest

from cluster.coordinator.clients.release_queue import ReleaseQueue
from cluster.core.errors import (
    TargetUnavailable,
)
from cluster.core.ids import SequenceId


async def test_releases_are_sent_in_batches_and_a_bug_drops_only_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.coordinator.clients.release_queue.MAX_BATCH", 2)
    sent: list[tuple[str, ...]] = []

    async def release(sequence_ids: Many[SequenceId]) -> None:
        sent.append(tuple(sequence_ids))
        if len(sent) == 1:
            raise TargetUnavailable("connection refused")
        if len(sent) == 2:
            raise ZeroDivisionError("a bug")

    releases = ReleaseQueue(release)
    releases.add(SequenceId(name) for name in "abc")
    await releases.close(5.0)
    assert sent == [("a", "b"), ("a", "b"), ("c",)]
