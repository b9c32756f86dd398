"""The gRPC API of an ingress behaves as that of a coordinator, and outlives coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.core.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from cluster.ingress.grpc import RoutedGenerationServicer
from cluster.ingress.observability.operations import RoutedOperationsServicer
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.server import GENERATION_SERVICE, OPERATIONS_SERVICE, WireServer
from pilotfish.v1 import generation_pb2, generation_pb2_grpc, operations_pb2_grpc
from tests.support.clusters.fake_coordinators import FakeReplicas, fake_replicas
from tests.support.clusters.routed_requests import KINDS, answers_of, request_of

STEP_SECONDS = 0.002


@asynccontextmanager
async def door(directory: Path, count: int) -> AsyncIterator[tuple[GenerationClient, FakeReplicas]]:
    """A client of an ingress over several coordinators."""
    async with (
        fake_replicas(directory, count, step_delay=STEP_SECONDS) as cluster,
        WireServer("127.0.0.1", 0) as server,
    ):
        router = cluster.router()
        server.add(
            GENERATION_SERVICE,
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            RoutedGenerationServicer(router, 60.0),
        )
        server.add(
            OPERATIONS_SERVICE,
            operations_pb2_grpc.add_OperationsServiceServicer_to_server,
            RoutedOperationsServicer(router),
        )
        client = GenerationClient(fixed_address(f"127.0.0.1:{await server.start()}"))
        yield client, cluster
        await client.close()


async def test_answers_equal_those_of_a_coordinator_also_when_one_dies(tmp_path: Path) -> None:
    async with door(tmp_path, 2) as (client, cluster):
        requests = [request_of(kind, 7) for kind in KINDS]
        direct = GenerationClient(fixed_address(cluster.replicas[0].view.address))
        expected = [await answers_of(direct, request) for request in requests]
        await direct.close()
        reading = [asyncio.create_task(answers_of(client, request)) for request in requests]
        await asyncio.sleep(0.03)
        await cluster.replicas[1].die()
        assert await asyncio.gather(*reading) == expected
    assert cluster.resumed


async def test_every_method_is_passed_on(tmp_path: Path) -> None:
    async with door(tmp_path, 2) as (client, _):
        tokens = await client.tokenize(generation_pb2.TokenizeRequest(text="hello"))
        text = await client.detokenize(generation_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert text.text == "hello"
        (model,) = await client.list_models()
        assert await client.get_model(model.id) == model
        exposition, content_type = await client.metrics()
        assert b'replica="r0-1"' in exposition
        assert b'replica="r1-1"' in exposition
        assert content_type.startswith("text/plain")
        stream = client.generate(request_of("sampled", 1, max_tokens=300), 60.0)
        await anext(stream)
        assert await client.abort("sampled-1")
        *_, last = [response async for response in stream]
        assert last.finished.reason == generation_pb2.FINISH_REASON_ABORT


async def test_errors_and_deadlines_are_those_of_the_coordinator(tmp_path: Path) -> None:
    async with door(tmp_path, 2) as (client, cluster):
        with pytest.raises(UnknownModel):
            await client.get_model("other")
        with pytest.raises(InvalidRequest) as refusal:
            await client.abort("not an id")
        assert refusal.value.field == "request_id"
        wrong = request_of("sampled", 1)
        wrong.sampling.temperature = -1.0
        with pytest.raises(InvalidRequest, match=r"temperature: -1\.0 is refused; it must be between 0 and"):
            await answers_of(client, wrong)
        for replica in cluster.replicas:
            replica.target.hang()
        with pytest.raises(DeadlineExceeded):
            async for _ in client.generate(request_of("sampled", 2), 0.3):
                pass
        for replica in cluster.replicas:
            replica.target.unhang()
