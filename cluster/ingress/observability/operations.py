"""The gRPC API for operators: the metrics, and the end of requests of any client."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import grpc

from cluster.core import bounds
from cluster.core.ids import check_request_id
from cluster.ingress.client import FullClient
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from pilotfish.v1 import operations_pb2, operations_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class MetricsSource(Protocol):
    """The coordinator's metrics, as the operations service uses them."""

    def exposition(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus text format and its content type."""


class OperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """The service for operators."""

    def __init__(self, metrics: MetricsSource, abort: Callable[[str, str], bool]) -> None:
        """`abort` ends a request, by its id and the name of its client, and returns whether it ran."""
        self._metrics = metrics
        self._abort = abort

    async def GetMetrics(
        self,
        request: operations_pb2.GetMetricsRequest,
        context: Context,
    ) -> operations_pb2.GetMetricsResponse:
        """Return the coordinator's metrics."""
        exposition, content_type = self._metrics.exposition()
        return operations_pb2.GetMetricsResponse(exposition=exposition, content_type=content_type)

    async def AbortRequest(
        self, request: operations_pb2.AbortRequestRequest, context: Context
    ) -> operations_pb2.AbortRequestResponse:
        """Abort a running request of any client."""
        return operations_pb2.AbortRequestResponse(aborted=self._abort(*_aborted(request)))


class RoutedOperationsServicer(operations_pb2_grpc.OperationsServiceServicer):
    """The service for operators, at an ingress."""

    def __init__(self, client: FullClient, own_metrics: IngressMetrics | None = None) -> None:
        self._client = client
        self._own_metrics = own_metrics or IngressMetrics()

    async def GetMetrics(
        self, request: operations_pb2.GetMetricsRequest, context: Context
    ) -> operations_pb2.GetMetricsResponse:
        """Return the metrics of all coordinators and of this ingress."""
        exposition, content_type = await self._client.metrics()
        return operations_pb2.GetMetricsResponse(
            exposition=self._own_metrics.appended_to(exposition), content_type=content_type
        )

    async def AbortRequest(
        self, request: operations_pb2.AbortRequestRequest, context: Context
    ) -> operations_pb2.AbortRequestResponse:
        """Abort a running request of any client."""
        return operations_pb2.AbortRequestResponse(aborted=await self._client.abort(*_aborted(request)))


def _aborted(request: operations_pb2.AbortRequestRequest) -> tuple[str, str]:
    """Return the id and the client of a request to end. Raises `InvalidRequest`."""
    client = bounds.text("client", request.client, bounds.MAX_CLIENT_BYTES)
    return check_request_id(request.request_id), client
