"""An ingress in the simulated cluster: the real router over the coordinators in a simulated directory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from cluster.core.membership import Member
from cluster.ingress.client import FullClient
from cluster.ingress.router.router import Router
from deploy.simulation.network import Call, Endpoint, Network
from deploy.simulation.nodes import CoordinatorNode
from deploy.simulation.remote import RemoteGeneration
from deploy.simulation.virtual_time import Process, now
from pilotfish.v1 import generation_pb2

HEARTBEAT_SECONDS = 1.0
EXPIRY_SECONDS = 3.0
"""A coordinator that was silent for this long leaves the view."""


class SimulatedDirectory:
    """The view of the coordinators: what the latest heartbeats said."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Member, float]] = {}

    def beat(self, nodes: Sequence[CoordinatorNode]) -> None:
        """Let the coordinators that run and are ready send a heartbeat."""
        for node in nodes:
            if node.process.is_alive and not node.process.is_frozen and node.coordinator.ready:
                view = node.view()
                self._heard[view.address] = view, now()

    def members(self) -> Sequence[Member]:
        """The coordinators that were heard of lately."""
        return [view for view, at in self._heard.values() if now() - at < EXPIRY_SECONDS]


def routed(network: Network, members: Callable[[], Sequence[Member]]) -> Router:
    """The real router over the simulated network."""

    def connect(address: str) -> FullClient:
        return cast("FullClient", RemoteGeneration(network, address))  # it has the methods that streams need

    return Router(members, connect)


class IngressNode:
    """The process of an ingress."""

    def __init__(self, network: Network, address: str, directory: SimulatedDirectory) -> None:
        self.process = Process(address)
        self._router = routed(network, directory.members)
        network.serve(address, Endpoint(self.process, {"Abort": self._abort}, {"Generate": self._generate}))

    async def _abort(self, request: bytes, call: Call) -> bytes:  # noqa: ARG002 - there is nothing to compute
        message = generation_pb2.AbortRequest.FromString(request)
        return b"1" if await self._router.abort(message.request_id, message.client) else b""

    def note_members(self) -> None:
        """Let waiting requests go to coordinators that have joined."""
        self._router.note_members()

    async def _generate(self, request: bytes, seconds_left: float) -> AsyncGenerator[bytes, None]:
        message = generation_pb2.GenerateRequest.FromString(request)
        async with aclosing(self._router.generate(message, seconds_left)) as responses:
            async for response in responses:
                yield response.SerializeToString()
