"""The HTTP and the gRPC API of one service, on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.core.config.draft_section import LearnsFrom
from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.generation.prompt_log import PromptLog
from cluster.generation.servicer import GenerationServicer
from cluster.ingress.access.grpc_access import AccessInterceptor
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.http import create_app
from cluster.ingress.observability.operations import OperationsServicer
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from cluster.wire.server import PublicOptions, WireServer
from cluster.wire.tls import client_context
from pilotfish.v1 import common_pb2, generation_pb2, generation_pb2_grpc, operations_pb2_grpc
from tests.support.fakes.fake_engine import OneMetric, ScriptedEngine, fake_service, listening
from tests.support.tls_access import TlsAccess

LIMITS = LimitsSection(max_body_bytes=65536, max_output_tokens=32)
TIMEOUT_SECONDS = 10.0
OWN_KEY = "the-servers-own-key"
Request = generation_pb2.GenerateRequest
Sampling = common_pb2.SamplingParameters
Stopping = generation_pb2.StoppingCriteria
BeamSearch = generation_pb2.BeamSearch
HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class BothApis:
    """An HTTP API and a gRPC API in front of one scripted engine, on real sockets."""

    engine: ScriptedEngine
    grpc_address: str
    client: GenerationClient
    http: httpx.AsyncClient
    app: FastAPI

    async def over_grpc(self, request: Request) -> tuple[str, str]:
        """The text of the answer, or the error text and the field of a refusal."""
        try:
            text = ""
            async for response in self.client.generate(request, TIMEOUT_SECONDS):
                text += response.delta.text
        except InvalidRequest as error:
            return str(error), error.field
        return text, ""

    async def over_http(self, body: dict[str, Any]) -> tuple[str, str]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await self.http.post(path, json=body)
        if response.status_code == 200:
            choice = response.json()["choices"][0]
            return choice["message"]["content"] if "messages" in body else choice["text"], ""
        assert response.status_code in (400, 404)
        error = response.json()["error"]
        return error["message"], error["param"]


@pytest.fixture
async def apis(tmp_path: Path) -> AsyncIterator[BothApis]:
    async with serving(tmp_path) as both:
        yield both


@asynccontextmanager
async def serving(
    directory: Path,
    keys: KeyRing | None = None,
    tls: PublicTlsSection | None = None,
    learns_from: LearnsFrom = "none",
    prompt_log: PromptLog | None = None,
) -> AsyncIterator[BothApis]:
    """Serve both APIs. With `keys`, they demand API keys, and `OWN_KEY` is the key of the server itself."""
    generation, engine, _ = fake_service(directory, limits=LIMITS, learns_from=learns_from, prompt_log=prompt_log)
    interceptors = () if keys is None else (AccessInterceptor(keys),)
    public = PublicOptions(tls)
    async with WireServer(
        "127.0.0.1", 0, max_message_bytes=LIMITS.max_body_bytes, interceptors=interceptors, public=public
    ) as server:
        server.add(
            "pilotfish.v1.GenerationService",
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            GenerationServicer(generation),
        )
        server.add(
            "pilotfish.v1.OperationsService",
            operations_pb2_grpc.add_OperationsServiceServicer_to_server,
            OperationsServicer(OneMetric(), lambda *_: False),
        )
        port = await server.start()
        await server.set_serving("pilotfish.v1.GenerationService", True)

        grpc_address = f"127.0.0.1:{port}"

        async def resolve() -> str:
            return grpc_address

        client = GenerationClient(resolve, PublicAccess(OWN_KEY) if tls is None else TlsAccess(tls, OWN_KEY))
        app = create_app(client, LIMITS, keys=keys)
        verify = True if tls is None else client_context(tls)
        async with listening(app, tls) as address, httpx.AsyncClient(base_url=address, verify=verify) as http:
            yield BothApis(engine, grpc_address, client, http, app)
        await client.close()
