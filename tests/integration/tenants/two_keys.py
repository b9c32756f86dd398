"""A whole cluster with an ingress in this process, and two clients of it with keys of their own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from cluster.core.config.sections import Configuration
from cluster.core.config.server import ClientLimitsSection
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.access.public_client import PublicClient
from cluster.ingress.http import create_app
from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import generation_pb2
from tests.support.clusters.coordinators import coordinator
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.unit.draft.contract.methods import CASES, Directories, MethodCase
from workers.serve.lease_servicer import Leases

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"
KEYS = parse_keys(f"alice {ALICE} admin learn requests_per_minute=9999\nbob {BOB}", "keys")
SETTLING_SECONDS = 0.3
"""After this time nothing runs any more that belongs to an answered request, in seconds."""
RELEASE_SECONDS = 15.0
"""Most time in which workers release the sequences of answered requests, on a busy machine."""


def configuration(directories: Directories, method: str, sharing: str = "off", **kv: Any) -> Configuration:
    """Settings of a small cluster that drafts with one method. `kv` are settings of the target's memory."""
    draft: dict[str, Any] = {"method": method}
    if method != "none":
        settings = CASES.get(method, MethodCase()).settings(directories)
        draft |= {"controller": "off", "max_nodes": 6, "max_depth": 4, "timeout_seconds": 60.0, method: dict(settings)}
    scheduler, server = {"max_sequences": 4, "max_step_tokens": 256}, {"sharing_between_keys": sharing}
    memory = {"pool_bytes": 1 << 20, **kv}
    return tiny_cluster(directories.target, draft, kv=memory, scheduler=scheduler, server=server)


@dataclass(frozen=True)
class TwoKeys:
    """The APIs of a cluster, and what the two clients send to them."""

    app: FastAPI
    grpc_address: str
    router: Router

    async def send(
        self, key: str, path: str, body: Mapping[str, Any] | None = None, method: str = "POST"
    ) -> httpx.Response:
        """Send one HTTP request."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://pilotfish", timeout=60.0) as http:
            return await http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})

    async def answered(self, key: str, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to one HTTP request."""
        response = await self.send(key, path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def completed(self, key: str, prompt: Sequence[int] | str, **values: Any) -> Any:
        """A completion whose tokens are 45, whatever the model is."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "allowed_token_ids": [45]}
        return await self.answered(key, "/v1/completions", body | values)

    async def over_grpc(
        self, key: str, request: generation_pb2.GenerateRequest
    ) -> list[generation_pb2.GenerateResponse]:
        """The responses to one gRPC request."""
        async with GenerationClient(fixed_address(self.grpc_address), PublicAccess(key)) as client:
            return [response async for response in client.generate(request, 60.0)]


@asynccontextmanager
async def two_keys(settings: Configuration) -> AsyncIterator[TwoKeys]:
    """A cluster, its ingress and its clients."""
    async with LocalCluster(settings, api_keys=KEYS) as cluster:
        view = coordinator("version:coordinator", cluster.grpc_address)
        shares = settings.server.sharing_between_keys == "on"
        router = Router(
            lambda: (view,),
            lambda address: GenerationClient(fixed_address(address), cluster.access),
            shares_between_keys=shares,
        )
        keys = KeyRing(KEYS)
        client = PublicClient(router, lambda name: keys.limits_of(name) or ClientLimitsSection())
        yield TwoKeys(create_app(client, settings.limits, keys=keys), cluster.grpc_address, router)
        await client.close()


async def settled() -> None:
    """Wait until nothing runs any more of what was answered, and workers have released its sequences."""
    await asyncio.sleep(SETTLING_SECONDS)
    workers = [one for one in gc.get_objects() if isinstance(one, Leases)]
    for _ in range(round(RELEASE_SECONDS / SETTLING_SECONDS)):
        if not any(lease.sequence_ids for one in workers for lease in one._leases.values()):
            break
        await asyncio.sleep(SETTLING_SECONDS)
