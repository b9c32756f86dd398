"""The router: one client of several coordinators. A request whose coordinator is lost continues at another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from cluster.core.errors import Aborted, DeadlineExceeded, NotReady, Overloaded, PilotfishError
from cluster.core.ids import scoped_request_id
from cluster.ingress.client import FullClient
from cluster.ingress.router.attempts import Attempts
from cluster.ingress.router.choice import CoordinatorView, PrefixMemory, choose, continuing, prefix_hashes
from cluster.ingress.router.metrics_text import merged
from cluster.ingress.router.pool import CoordinatorPool, RunningStream
from cluster.ingress.router.progress import StreamProgress
from pilotfish.v1 import generation_pb2

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


class Router:
    """A client of the public service over several coordinators, with the methods of a client of one.

    `members` returns the coordinators of the cluster, also those that drain; it is called for every request and must be
    quick.
    `connect` returns a client of the coordinator at an address, for example a `GenerationClient`; the router closes
    it. A stream that has begun waits for a coordinator until its deadline; a request that no coordinator has accepted
    waits `patience_seconds`. `shares_between_keys`: see `ServerSection.sharing_between_keys`.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[CoordinatorView]],
        connect: Callable[[str], FullClient],
        patience_seconds: float = 30.0,
        *,
        shares_between_keys: bool = False,
    ) -> None:
        self._pool = CoordinatorPool(members, connect)
        self._memory = PrefixMemory()
        self._patience_seconds = patience_seconds
        self._shares_between_keys = shares_between_keys

    async def generate(self, request: generation_pb2.GenerateRequest, timeout_seconds: float) -> Responses:
        """Yield the responses of one request as one stream, also when coordinators are lost on the way.

        Closing the iterator cancels the call. Raises what the coordinator raises; `DeadlineExceeded`, `NotReady` and
        `Overloaded` if no coordinator accepts the request in time; `ModelChanged` if none can continue the stream.
        """
        progress = StreamProgress(request)
        hashes = prefix_hashes(request, shares_between_keys=self._shares_between_keys)
        attempts = Attempts(self._patience_seconds)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            views, left = continuing(self._pool.members(), progress.coordinator), deadline - loop.time()
            in_flight, earlier = self._pool.in_flight, request.coordinator
            view = choose(hashes, views, in_flight, self._memory, attempts.failed, earlier) if left > 0 else None
            if view is None:
                await attempts.pause(left, has_started=progress.has_started)
                continue
            missing = self._memory.missing(hashes, view.id)
            self._memory.record(hashes, view.id, [one.id for one in views])
            with self._pool.running(progress.scoped_id, view, missing) as stream:
                stream.may_move = attempts.may_move
                try:
                    async with aclosing(_attempt(self._pool, stream, progress, left)) as responses:
                        async for response in responses:
                            attempts.succeed()
                            yield response
                    return
                except (NotReady, Aborted, Overloaded) as error:
                    log.info("request %s: %s is lost or refuses: %s", progress.request_id, view.id, error)
                    attempts.fail(view.id, error, has_moved=stream.has_moved)
            if stream.is_aborted:
                break
        if not progress.has_started:
            raise Aborted(f"request {progress.request_id} was aborted")
        for response in progress.aborted():
            yield response

    async def abort(self, request_id: str, client: str = "") -> bool:
        """Abort a request of the client with that name, here or at any ingress. Returns whether it was running."""
        stream = self._pool.stream(scoped_request_id(client, request_id))
        if stream is not None:
            stream.is_aborted = True
            return await stream.client.abort(request_id, client)
        found = await self._all(lambda coordinator: coordinator.abort(request_id, client))
        return any(answer is True for answer in found.values())

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        """Convert text or a conversation to token ids."""
        return await self._any(lambda client: client.tokenize(request))

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        return await self._any(lambda client: client.detokenize(request))

    async def list_models(self) -> Sequence[generation_pb2.Model]:
        """Return the served models, each once."""
        return await self._any(lambda client: client.list_models())

    async def get_model(self, name: str) -> generation_pb2.Model:
        """Return one served model. Raises `UnknownModel`."""
        return await self._any(lambda client: client.get_model(name))

    async def metrics(self) -> tuple[bytes, str]:
        """Return the metrics of all coordinators, with a label for each, and their content type."""
        found = await self._all(lambda client: client.metrics())
        answers = {name: answer for name, answer in found.items() if not isinstance(answer, PilotfishError)}
        if not answers:
            raise NotReady("no coordinator can be reached")
        (_, content_type), *_ = answers.values()
        return merged({name: exposition for name, (exposition, _) in answers.items()}), content_type

    async def is_ready(self) -> bool:
        """Whether a coordinator accepts requests."""
        return True in (await self._all(lambda client: client.is_ready())).values()

    async def is_reachable(self) -> bool:
        """Whether a coordinator answers, ready or not."""
        return True in (await self._all(lambda client: client.is_reachable())).values()

    async def close(self) -> None:
        """Close all connections. Running streams break off."""
        await self._pool.close()

    async def _any(self, call: Callable[[FullClient], Awaitable[_Answer]]) -> _Answer:
        """Return the answer of the least loaded coordinator that can be reached. Raises its error."""
        refusals: dict[str, PilotfishError] = {}
        while view := choose((), self._pool.members(), self._pool.in_flight, self._memory, refusals):
            try:
                return await call(self._pool.client(view))
            except (NotReady, Aborted, DeadlineExceeded) as error:
                refusals[view.id] = error
        raise next(reversed(refusals.values()), NotReady("no coordinator is ready"))

    async def _all(self, call: Callable[[FullClient], Awaitable[_Answer]]) -> dict[str, _Answer | PilotfishError]:
        """Return the answer or error of every coordinator, by its id."""
        views = self._pool.members()

        async def one(view: CoordinatorView) -> _Answer | PilotfishError:
            try:
                return await call(self._pool.client(view))
            except PilotfishError as error:
                return error

        answers = await asyncio.gather(*map(one, views))
        return {view.id: answer for view, answer in zip(views, answers, strict=True)}


async def _attempt(
    pool: CoordinatorPool, stream: RunningStream, progress: StreamProgress, timeout_seconds: float
) -> Responses:
    """Yield the responses that one coordinator adds to the stream. Raises its errors."""
    held: list[generation_pb2.GenerateResponse] = []
    if progress.is_held_back:
        progress.restart()
    async with aclosing(stream.client.generate(progress.message(), timeout_seconds)) as responses:
        while True:
            try:
                response = await _next(stream, responses)
            except StopAsyncIteration:
                break
            except PilotfishError:
                if progress.is_complete:
                    break  # the connection was lost after the last response
                raise
            pool.note_response(stream)
            if response.HasField("started"):
                response.started.coordinator = response.started.coordinator or stream.coordinator.id
            passed = progress.receive(response)
            if passed is not None and progress.is_held_back:
                held.append(passed)
            elif passed is not None:
                yield passed
    for response in held:
        yield response


async def _next(stream: RunningStream, responses: Responses) -> generation_pb2.GenerateResponse:
    """Return the next response. Raises `NotReady` if the coordinator fell silent and left the cluster or is stalled."""
    stream.wait()
    try:
        return await anext(responses)
    except asyncio.CancelledError:
        if not stream.is_given_up():
            raise
        reason = "is stalled" if stream.has_moved else "left the cluster"
        raise NotReady(f"coordinator {stream.coordinator.id} {reason}") from None
    finally:
        stream.waiting = None
