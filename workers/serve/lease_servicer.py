"""`LeaseService` over the leases of a worker's clients."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from typing import Any

import grpc

from cluster.wire.codec.common import decode_client
from pilotfish.v1 import lease_pb2, lease_pb2_grpc
from workers.serve.leases import Leases


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """Renews leases. It is answered in the event loop, also while the worker computes."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def Renew(
        self, request: lease_pb2.RenewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lease_pb2.RenewResponse:
        """Keep what the client stores on this worker."""
        with self._leases.call(decode_client(request.client)):
            return lease_pb2.RenewResponse()
