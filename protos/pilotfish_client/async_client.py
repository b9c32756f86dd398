"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Self

import grpc

from pilotfish.v1 import generation_pb2
from pilotfish_client.access import SHORT_CALL_SECONDS, ServerChannels
from pilotfish_client.errors import PilotfishClientError, Unavailable, from_rpc_error
from pilotfish_client.events import Collector, Completion, Event, to_event
from pilotfish_client.progress import StreamProgress
from pilotfish_client.requests import (
    DEFAULT_PARAMETERS,
    Message,
    Parameters,
    Prompt,
    make_request,
    set_prompt,
)


class AsyncClient(ServerChannels):
    """A client of Pilotfish's gRPC API, for one event loop.

    `addresses` are servers of one cluster; a stream that breaks off goes on at the next. A request that no server has
    accepted waits `patience_seconds` for one. Close the client, or use it in `async with`.
    """

    _grpc = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Running streams break off."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def generate(
        self, prompt: Prompt, parameters: Parameters = DEFAULT_PARAMETERS, timeout_seconds: float | None = None
    ) -> Completion:
        """Return the whole answers. Raises `PilotfishClientError`."""
        progress, collector = StreamProgress(make_request(prompt, parameters)), Collector()
        async with aclosing(self._events(progress, timeout_seconds)) as events:
            async for event in events:
                collector.add(event)
        return collector.completion(progress.resumptions)

    def stream(
        self, prompt: Prompt, parameters: Parameters = DEFAULT_PARAMETERS, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of the answers, as tokens are committed. Closing the generator cancels the call.

        After a lost connection the stream goes on where it stopped. Raises `PilotfishClientError`.
        """
        return self._events(StreamProgress(make_request(prompt, parameters)), timeout_seconds)

    async def _events(self, progress: StreamProgress, timeout_seconds: float | None) -> AsyncGenerator[Event, None]:
        begun = self._now()
        deadline = begun + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            try:
                async with aclosing(self._attempt(progress, deadline - self._now())) as events:
                    async for event in events:
                        yield event
                if progress.is_complete:
                    return
                failure: PilotfishClientError = Unavailable("the stream ended before the answers were complete")
            except PilotfishClientError as error:
                failure = error
            self._current += 1
            now = self._now()
            await asyncio.sleep(progress.pause(failure, deadline - now, self._patience_seconds - (now - begun)))

    async def _attempt(self, progress: StreamProgress, seconds: float) -> AsyncGenerator[Event, None]:
        call = self._stub().Generate(progress.message(), timeout=max(0.0, seconds), metadata=self._access.metadata)
        try:
            async for response in call:
                event = to_event(response)
                if progress.receive(response) and event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """Abort a running request. Returns whether it was running."""
        message = generation_pb2.AbortRequest(request_id=request_id)
        answer: generation_pb2.AbortResponse = await self._call("Abort", message)
        return answer.aborted

    async def tokenize(
        self, prompt: str | Sequence[Message], add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a text or a conversation."""
        message = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        set_prompt(message, prompt)
        answer: generation_pb2.TokenizeResponse = await self._call("Tokenize", message)
        return tuple(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool | None = None) -> str:
        """Return the text of tokens."""
        message = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        answer: generation_pb2.DetokenizeResponse = await self._call("Detokenize", message)
        return answer.text

    async def models(self) -> tuple[str, ...]:
        """Return the names of the served models."""
        answer: generation_pb2.ListModelsResponse = await self._call("ListModels", generation_pb2.ListModelsRequest())
        return tuple(model.id for model in answer.models)

    async def _call(self, method: str, message: Any) -> Any:
        call = getattr(self._stub(), method)
        try:
            return await call(message, timeout=SHORT_CALL_SECONDS, metadata=self._access.metadata)
        except grpc.aio.AioRpcError as error:
            self._current += 1
            raise from_rpc_error(error) from error

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
