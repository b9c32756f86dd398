"""Probes and metrics of an ingress while some of its coordinators are frozen, lost or not ready."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.core.errors import NotReady
from cluster.ingress.router import router as router_module
from cluster.ingress.router.router import Router
from tests.support.clusters.coordinators import coordinator


class Coordinator:
    """A client of a coordinator that is `well`, `frozen` (it never answers), `lost` or `starting`."""

    def __init__(self, state: str) -> None:
        self._state = state
        self.asked = 0

    async def is_ready(self) -> bool:
        return await self._answer() and self._state == "well"

    async def is_reachable(self) -> bool:
        return await self._answer()

    async def metrics(self) -> tuple[bytes, str]:
        if not await self._answer():
            raise NotReady("lost")
        return b"answers_total 1.0\n", "text/plain"

    async def close(self) -> None:
        pass

    async def _answer(self) -> bool:
        self.asked += 1
        if self._state == "frozen":
            await asyncio.Event().wait()
        return self._state != "lost"


def router_of(*states: str) -> tuple[Router, list[Coordinator]]:
    clients = [Coordinator(state) for state in states]
    members = [coordinator(state, f"127.0.0.1:{number}") for number, state in enumerate(states)]

    def connect(address: str) -> Any:
        return clients[int(address.rpartition(":")[2])]

    return Router(lambda: members, connect), clients


@pytest.mark.parametrize("states", [("frozen", "well"), ("well", "frozen"), ("frozen", "lost", "starting", "well")])
async def test_a_frozen_coordinator_delays_no_probe(states: tuple[str, ...]) -> None:
    """A probe of Kubernetes waits for seconds: all ingress pods would leave their Service with one coordinator."""
    router, clients = router_of(*states)
    async with asyncio.timeout(1.0):
        assert await router.is_ready()
        assert await router.is_reachable()
    assert all(client.asked == 2 for client in clients)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await router.close()


@pytest.mark.parametrize(
    ("states", "is_ready", "is_reachable"),
    [((), False, False), (("lost",), False, False), (("starting", "lost"), False, True), (("well",), True, True)],
)
async def test_one_coordinator_is_enough(states: tuple[str, ...], is_ready: bool, is_reachable: bool) -> None:
    router, _ = router_of(*states)
    assert (await router.is_ready(), await router.is_reachable()) == (is_ready, is_reachable)
    await router.close()


async def test_metrics_come_without_those_of_a_frozen_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "_METRICS_SECONDS", 0.1)
    router, _ = router_of("frozen", "lost", "well")
    async with asyncio.timeout(5.0):
        exposition, _ = await router.metrics()
    assert exposition == b'answers_total{replica="well"} 1.0\n'
    alone, _ = router_of("frozen")
    with pytest.raises(NotReady):
        await alone.metrics()
