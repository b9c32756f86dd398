"""How many generators hand on a token between the engine and the client."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import AsyncGeneratorType
from typing import Any

import httpx
import pytest

from cluster.core.config.server import ClientLimitsSection
from cluster.generation.servicer import GenerationServicer
from cluster.ingress.access.public_client import PublicClient
from cluster.ingress.http import create_app
from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.coordinator_client import CoordinatorClient
from cluster.wire.coordinator_service import CoordinatorServicer
from cluster.wire.server import COORDINATOR_SERVICE, WireServer
from pilotfish.v1 import coordinator_pb2_grpc
from tests.support.clusters.coordinators import coordinator
from tests.support.fakes.fake_engine import ScriptedEngine, fake_service, listening
from tests.support.fakes.http_app import HI, LIMITS

MOST = 8
OTHERS = {
    "interceptor.py": "it carries the stream of a connection, with all of its calls",
    "coordinator_service.py": "it carries the stream of a connection, with all of its calls",
    "_Stream._requests": "it carries the requests of a connection",
    "GenerationService._reserved": "a context manager",
}
"""Files and functions whose generators hand on no token of one call, with the reason."""


@asynccontextmanager
async def deployed(directory: Path) -> AsyncIterator[tuple[ScriptedEngine, str]]:
    """The processes of a cluster as they are deployed, over a scripted engine. Yields it and the URL of the API."""
    generation, engine, _ = fake_service(directory, limits=LIMITS)
    servicer = CoordinatorServicer(GenerationServicer(generation).responses)
    async with WireServer("127.0.0.1", 0) as server:
        server.add(COORDINATOR_SERVICE, coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer)
        view = coordinator("version:one", f"127.0.0.1:{await server.start()}")
        router = Router(lambda: (view,), lambda address: CoordinatorClient(fixed_address(address)))
        client = PublicClient(router, lambda _: ClientLimitsSection())
        async with listening(create_app(client, LIMITS)) as url:
            yield engine, url
        await client.close()


def relays() -> set[str]:
    """The suspended generators of the product that belong to a call."""
    found = set()
    for one in gc.get_objects():
        if type(one) is AsyncGeneratorType and one.ag_frame is not None:
            code, path = one.ag_code, Path(one.ag_code.co_filename)
            names = (path.name, code.co_qualname)
            if {"cluster", "deploy", "workers"} & set(path.parts[-4:-1]) and not OTHERS.keys() & set(names):
                found.add(f"{path.name}:{code.co_qualname}")
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": "hi", "stream_options": {"include_usage": True}, "stream_interval": 2}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 8, "model": "tiny"}),
    ],
)
async def test_a_token_comes_back_through_at_most_eight_generators(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with deployed(tmp_path) as (engine, url), httpx.AsyncClient(base_url=url) as http:
        engine.hold_after = 1
        async with http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            await anext(response.aiter_bytes())
            await asyncio.sleep(0)
            found = relays()
        assert any("service.py" in one for one in found)
        assert any("router.py" in one for one in found)
        # The scripted engine stands for the one generator of the coordinator.
        assert len(found) + 1 <= MOST, sorted(found)
