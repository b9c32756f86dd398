"""A connection to one server that resolves its address again after the server was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.errors import PilotfishError
from cluster.wire.channel import open_channel
from cluster.wire.peer_access import OPEN, PeerAccess, PublicAccess
from cluster.wire.status import from_rpc_error

Resolve = Callable[[], Awaitable[str]]
"""Returns the server's current `host:port`. It is called whenever a channel is opened."""
SHORT_CALL_SECONDS = 10.0
"""Timeout of calls that compute nothing, in seconds."""
_RESOLVE_SECONDS = 10.0
_LONGEST_CALL_SECONDS = 86_400.0
"""How long the calls on the channel of a lost server may still run, in seconds."""
_NOT_WRITTEN = "Internal error from Core"
"""What gRPC says of a call that ended while a message of it was sent. It then keeps no status of the server's."""


def fixed_address(address: str) -> Resolve:
    """A resolver for a server whose address never changes."""

    async def resolve() -> str:
        return address

    return resolve


class Connection:
    """One channel to a server. It is opened when needed. When the server is lost, the next call resolves again."""

    def __init__(
        self, resolve: Resolve, unavailable: type[PilotfishError], access: PeerAccess | PublicAccess = OPEN
    ) -> None:
        self._resolve = resolve
        self.unavailable = unavailable
        """What is raised where the server cannot be reached."""
        self._access = access
        self.metadata = access.metadata()
        """The metadata that every call must have."""
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def channel(self) -> grpc.aio.Channel:
        """Return the channel; open it if necessary. Raises `unavailable` if the address cannot be resolved."""
        if self._channel is None:
            try:
                async with asyncio.timeout(_RESOLVE_SECONDS):
                    address = await self._resolve()
            except (OSError, TimeoutError) as error:
                raise self.unavailable(f"the address of the server is not known: {error!r}") from error
            if self._channel is None:
                self._channel = open_channel(
                    address,
                    max_message_bytes=MAX_MESSAGE_BYTES,
                    credentials=self._access.channel_credentials(),
                    server_name=self._access.server_name,
                )
        return self._channel

    async def call(self, method: Callable[[grpc.aio.Channel], Any], request: Any, timeout_seconds: float) -> Any:
        """Call the method of a channel and return its answer. Raises what `channel`, `checked` and `failed` say."""
        channel = await self.channel()
        try:
            return self.checked(await method(channel)(request, timeout=timeout_seconds, metadata=self.metadata))
        except grpc.aio.AioRpcError as error:
            raise self.failed(error, channel) from error

    def is_open(self, channel: grpc.aio.Channel) -> bool:
        """Whether the next call uses this channel: its server was not lost, and `close` was not called."""
        return channel is self._channel

    def failed(self, error: grpc.aio.AioRpcError, channel: grpc.aio.Channel) -> PilotfishError:
        """Return the error to raise for a failed call on a channel.

        If the server was lost, the next call opens another channel. A server that refuses the token is lost, too:
        another cluster may have its port now. A call that fails late, when its channel was replaced, loses nothing.

        The old channel is closed after the last call on it, because other calls may still run.
        """
        is_cut = error.code() is grpc.StatusCode.INTERNAL and error.details() == _NOT_WRITTEN
        is_lost = is_cut or error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        if is_lost and channel is self._channel:
            self._channel = None
            closing = asyncio.create_task(channel.close(_LONGEST_CALL_SECONDS), name="close channel")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        _drop_frames(error)
        if is_cut:
            return self.unavailable("the connection was lost while a message was sent")
        return from_rpc_error(error, self.unavailable)

    def checked(self, answer: Any) -> Any:
        """Return the answer, or raise `unavailable` for `None`: gRPC's value for bytes that are not a valid message."""
        if answer is None:
            raise self.unavailable("the answer is not a message of the schema")
        return answer

    async def close(self) -> None:
        """Close the channel, and end the calls on it. The next call opens another.

        Channels of lost servers are closed after their last calls, which end by themselves.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and of those before it.

    Their frames hold the failed call, and the call holds its connection open until the error is collected.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
