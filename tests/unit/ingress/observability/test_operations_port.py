"""The operations service of an ingress: beside the public services, or on a port of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.config.sections import LimitsSection
from cluster.core.config.server import ServerSection
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from deploy.ray.ingress_server import IngressServer
from pilotfish.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc
from tests.support.fakes.http_app import HttpApi


def code_of(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return error.value.code()


@pytest.mark.parametrize("is_own", [True, False])
async def test_metrics_and_aborts_are_where_the_setting_says(tmp_path: Path, is_own: bool) -> None:
    client, metrics = HttpApi(tmp_path).client, IngressMetrics()
    section = ServerSection(grpc_port=0, operations_port=0 if is_own else None)
    server = IngressServer(client, section, LimitsSection(), KeyRing(), metrics)
    public = await server.start()
    try:
        assert (server.operations_port is not None) is is_own
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{public}") as outside,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.operations_port or public}") as inside,
        ):
            stub: Any = operations_pb2_grpc.OperationsServiceStub(inside)
            answer = await stub.AbortRequest(operations_pb2.AbortRequestRequest(request_id="one", client="alice"))
            assert answer.aborted
            assert client.aborted == [("one", "")]  # without keys, no request has a client
            assert b"answers_total 1" in (await stub.GetMetrics(operations_pb2.GetMetricsRequest())).exposition
            with pytest.raises(grpc.aio.AioRpcError) as wrong:
                await stub.AbortRequest(operations_pb2.AbortRequestRequest(request_id="one two"))
            assert code_of(wrong) is grpc.StatusCode.INVALID_ARGUMENT
            text = (await stub.GetMetrics(operations_pb2.GetMetricsRequest())).exposition.decode()
            assert 'pilotfish:refusals_total{api="grpc",reason="InvalidRequest"} 1.0' in text
            for channel in (inside, outside):
                health: Any = health_pb2_grpc.HealthStub(channel)
                checked = await health.Check(health_pb2.HealthCheckRequest())
                assert checked.status == health_pb2.HealthCheckResponse.SERVING
            if is_own:
                with pytest.raises(grpc.aio.AioRpcError) as absent:
                    await operations_pb2_grpc.OperationsServiceStub(outside).GetMetrics(
                        operations_pb2.GetMetricsRequest()
                    )
                assert code_of(absent) is grpc.StatusCode.UNIMPLEMENTED
                with pytest.raises(grpc.aio.AioRpcError) as absent:
                    await generation_pb2_grpc.GenerationServiceStub(inside).Abort(
                        generation_pb2.AbortRequest(request_id="one")
                    )
                assert code_of(absent) is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0.0)
