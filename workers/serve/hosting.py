"""One engine behind one gRPC server: what a worker's process hosts, in Ray or without it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from cluster.wire.server import WireServer
from pilotfish.v1 import draft_pb2_grpc, target_pb2_grpc
from workers.draft.method import DraftMethod
from workers.serve.draft_servicer import DraftServicer
from workers.serve.target_servicer import TargetServicer
from workers.target.engine import TargetEngine
from workers.target.ranks import RankZero

TARGET_SERVICE = "pilotfish.v1.TargetService"
DRAFT_SERVICE = "pilotfish.v1.DraftService"

_GRACE_SECONDS = 1.0
"""How long calls in flight may take when a worker ends; the coordinator repeats them elsewhere."""


class TargetHost:
    """A loaded target at an address of its own, from `start()` to `stop()`."""

    def __init__(self, engine: TargetEngine | RankZero, host: str) -> None:
        self._host = host
        self._server = WireServer(host, 0)
        self._servicer = TargetServicer(engine)
