"""What the HTTP door asks of the public service; the gRPC client and the tests' in-process one implement it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pilotfish.v1 import generation_pb2


class Client(Protocol):
    """The public service, seen from outside. Errors arrive as the `PilotfishError` that was raised there."""

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float, /
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One answer, at most `timeout_seconds` long; closing it cancels the call."""
        ...

    async def list_models(self) -> Sequence[generation_pb2.Model]:
        """The models served."""
        ...

    async def get_model(self, name: str) -> generation_pb2.Model:
        """One of them. Raises `UnknownModel`."""
        ...

    async def metrics(self) -> tuple[bytes, str]:
        """Prometheus text and its content type."""
        ...

    async def is_ready(self) -> bool:
        """Whether requests are taken."""
        ...
