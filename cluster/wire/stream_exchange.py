"""Alternating requests and responses on a bidirectional stream, with the interface of a unary method."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from cluster.wire.connection import Connection
from cluster.wire.peer_access import Metadata


class AnswerLost(grpc.aio.AioRpcError):
    """The connection was lost after the server had the request."""


class StreamExchange:
    """A streaming method, and on each channel a method with the interface of a unary one.

    A stream is reused by later calls, which saves the time to open one. A new stream is opened if all are in use. A
    stream that failed or was cancelled is not reused.
    """

    def __init__(self, connection: Connection, method: Callable[[grpc.aio.Channel], Any]) -> None:
        """`method` returns the streaming method of a channel."""
        self._connection = connection
        self._method = method
        self._idle: list[tuple[grpc.aio.Channel, Any]] = []

    def on(self, channel: grpc.aio.Channel) -> Callable[..., Awaitable[Any]]:
        """Return the method on a channel. It sends a request, returns the response, and raises `AioRpcError`."""
        return partial(self._exchange, channel)

    async def _exchange(
        self,
        channel: grpc.aio.Channel,
        request: Any,
        timeout: float,  # noqa: ASYNC109 - gRPC's names
        metadata: Metadata,
    ) -> Any:
        stream = self._take(channel) or self._method(channel)(metadata=metadata)
        try:
            async with asyncio.timeout(timeout):
                await _write(stream, request)
                answer = await _read(stream)
        except TimeoutError:
            stream.cancel()
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout} s") from None
        except BaseException:
            stream.cancel()
            raise
        if answer is grpc.aio.EOF:
            raise _failure(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        if self._connection.is_open(channel):
            self._idle.append((channel, stream))
        else:
            stream.cancel()
        return answer

    def close(self) -> None:
        """Cancel the streams that are not in use."""
        idle, self._idle = self._idle, []
        for _, stream in idle:
            stream.cancel()

    def _take(self, channel: grpc.aio.Channel) -> Any:
        """Return an idle stream of the channel, or `None`."""
        for opened_on, stream in self._idle:
            if opened_on is not channel:  # the channel was lost and replaced
                stream.cancel()
        self._idle = [(opened_on, stream) for opened_on, stream in self._idle if not stream.done()]
        return self._idle.pop()[1] if self._idle else None


async def _write(stream: Any, request: Any) -> None:
    try:
        await stream.write(request)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL:  # gRPC reports a stream that the server has ended this way
            raise _failure(grpc.StatusCode.UNAVAILABLE, "the server has ended the stream") from error
        raise


async def _read(stream: Any) -> Any:
    try:
        return await stream.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():  # no status of the server's
            raise AnswerLost(error.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), error.details()) from error
        raise


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
