"""The ports through which both APIs call the public service.

Their implementations raise the same `PilotfishError` as the service: `cluster.wire.generation_client.GenerationClient`
for one server, and `cluster.ingress.router.router.Router` for several.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pilotfish.v1 import generation_pb2


class ServiceClient(Protocol):
    """What the HTTP API calls."""

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float, /
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of one request. Closing the iterator cancels the call."""

    async def list_models(self) -> Sequence[generation_pb2.Model]:
        """Return the served models."""

    async def get_model(self, name: str, /) -> generation_pb2.Model:
        """Return one served model. Raises `UnknownModel`."""

    async def tokenize(self, request: generation_pb2.TokenizeRequest, /) -> generation_pb2.TokenizeResponse:
        """Convert text or a conversation to token ids."""

    async def detokenize(self, request: generation_pb2.DetokenizeRequest, /) -> generation_pb2.DetokenizeResponse:
        """Convert token ids to text."""

    async def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus text format and its content type."""

    async def is_ready(self) -> bool:
        """Whether the service accepts requests."""

    async def is_reachable(self) -> bool:
        """Whether the service answers, ready or not."""


class FullClient(ServiceClient, Protocol):
    """What both APIs of an ingress call, and what its router calls of each coordinator."""

    async def abort(self, request_id: str, client: str = "", /) -> bool:
        """Abort a request of the client with that name. Returns whether it was running."""

    async def close(self) -> None:
        """Close the connections."""
