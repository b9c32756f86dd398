"""A drafter that the page kills: it is away for a while, and comes back at another port."""

from __future__ import annotations

import asyncio

import pytest

from cluster.core.config.load import load
from cluster.core.errors import DrafterUnavailable
from cluster.wire.peer_access import OPEN
from deploy.local.local_cluster import LocalDrafter
from tests.support.deadline import deadline

SECONDS = 30.0


async def test_a_killed_drafter_is_away_until_it_starts_again() -> None:
    configuration = load({}, {"draft.method": "ngram", "draft.placement": "drafter"})
    async with deadline(SECONDS), LocalDrafter(configuration, OPEN, restart_seconds=0.05) as drafter:
        first = await drafter.resolve()
        assert await drafter.kill()
        with pytest.raises(DrafterUnavailable):
            await drafter.resolve()
        assert not await drafter.kill()  # it is away already
        while True:
            try:
                again = await drafter.resolve()
                break
            except DrafterUnavailable:
                await asyncio.sleep(0.01)
        assert again.rpartition(":")[0] == first.rpartition(":")[0]


async def test_a_killed_drafter_does_not_start_after_its_end() -> None:
    configuration = load({}, {"draft.method": "ngram", "draft.placement": "drafter"})
    async with deadline(SECONDS):
        async with LocalDrafter(configuration, OPEN, restart_seconds=SECONDS) as drafter:
            await drafter.kill()
        with pytest.raises(DrafterUnavailable):
            await drafter.resolve()
