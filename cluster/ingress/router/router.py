"""The router: one client of several coordinators. A request whose coordinator is lost continues at another one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from cluster.core.errors import Aborted, DeadlineExceeded, NotReady, Overloaded, PilotfishError
from cluster.core.ids import scoped_request_id
from cluster.core.membership import Member
from cluster.ingress.client import FullClient
from cluster.ingress.router.attempts import Arrivals, Attempts
from cluster.ingress.router.choice import PrefixMemory, choose, continuing, prefix_hashes
from cluster.ingress.router.metrics_text import merged
from cluster.ingress.router.pool import CoordinatorPool, RunningStream
from cluster.ingress.router.progress import StreamProgress
from pilotfish.v1 import generation_pb2

log = logging.getLogger(__name__)

_METRICS_SECONDS = 5.0
"""How long the metrics of one coordinator are waited for, in seconds: less than Prometheus waits for all."""
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
        members: Callable[[], Sequence[Member]],
        connect: Callable[[str], FullClient],
        patience_seconds: float = 30.0,
        *,
        shares_between_keys: bool = False,
    ) -> None:
        self._pool = CoordinatorPool(members, connect)
        self._memory = PrefixMemory()
        self._patience_seconds = patience_seconds
        self._shares_between_keys = shares_between_keys
        self._is_draining = False
        self._arrivals = Arrivals()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a coordinator."""
        return self._arrivals.waiting

    def note_members(self) -> None:
        """Let waiting requests go to coordinators that have joined. Call it when the members may have changed."""
        self._arrivals.note(frozenset(one.id for one in self._pool.members()))

    def drain(self) -> None:
        """Wait for no coordinator any more, because all drain: a request that one refuses ends with its error."""
        self._is_draining = True

    async def generate(self, request: generation_pb2.GenerateRequest, timeout_seconds: float) -> Responses:
        """Yield the responses of one request as one stream, also when coordinators are lost on the way.

        Closing the iterator cancels the call. Raises what the coordinator raises; `DeadlineExceeded`, `NotReady` and
        `Overloaded` if no coordinator accepts the request in time; `ModelChanged` if none can continue the stream.
        """
        progress = StreamProgress(request)
        hashes = prefix_hashes(request, shares_between_keys=self._shares_between_keys)
        attempts = Attempts(self._patience_seconds, self._arrivals)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            views, left = continuing(self._pool.members(), progress.coordinator), deadline - loop.time()
            in_flight, earlier = self._pool.in_flight, request.coordinator
            view = choose(hashes, views, in_flight, self._memory, attempts.failed, earlier) if left > 0 else None
            if view is None:
                if self._is_draining and left > 0:
                    raise attempts.latest
                await attempts.pause(left, has_started=progress.has_started)
                continue
            missing = self._memory.missing(hashes, view.id)
            self._memory.record(hashes, view.id, [one.id for one in views])
            with self._pool.running(progress.scoped_id, view, missing) as stream:
                stream.may_move = attempts.may_move
                try:
                    async with aclosing(_Attempt(self._pool, stream, progress, left)) as attempt:
                        while (response := await attempt.next()) is not None:
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
        """Return the metrics of all coordinators, with a label for each, and their content type.

        Those that do not answer soon are left out. Raises `NotReady` if none answers.
        """

        async def read(client: FullClient) -> tuple[bytes, str]:
            try:
                async with asyncio.timeout(_METRICS_SECONDS):
                    return await client.metrics()
            except TimeoutError:
                raise NotReady(f"no metrics within {_METRICS_SECONDS:g} s") from None

        found = await self._all(read)
        answers = {name: answer for name, answer in found.items() if not isinstance(answer, PilotfishError)}
        if not answers:
            raise NotReady("no coordinator can be reached")
        (_, content_type), *_ = answers.values()
        return merged({name: exposition for name, (exposition, _) in answers.items()}), content_type

    async def is_ready(self) -> bool:
        """Whether a coordinator accepts requests."""
        return await self._has(lambda client: client.is_ready())

    async def is_reachable(self) -> bool:
        """Whether a coordinator answers, ready or not."""
        return await self._has(lambda client: client.is_reachable())

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

    async def _has(self, ask: Callable[[FullClient], Awaitable[bool]]) -> bool:
        """Whether a coordinator says yes. It is returned at once: probes do not wait for one that is frozen or lost."""

        async def one(view: Member) -> bool:
            try:
                return await ask(self._pool.client(view))
            except PilotfishError:
                return False

        asking = [asyncio.create_task(one(view)) for view in self._pool.members()]
        try:
            for answer in asyncio.as_completed(asking):
                if await answer:
                    return True
            return False
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _all(self, call: Callable[[FullClient], Awaitable[_Answer]]) -> dict[str, _Answer | PilotfishError]:
        """Return the answer or error of every coordinator, by its id."""
        views = self._pool.members()

        async def one(view: Member) -> _Answer | PilotfishError:
            try:
                return await call(self._pool.client(view))
            except PilotfishError as error:
                return error

        answers = await asyncio.gather(*map(one, views))
        return {view.id: answer for view, answer in zip(views, answers, strict=True)}


class _Attempt:
    """The responses that one coordinator adds to a stream."""

    def __init__(
        self, pool: CoordinatorPool, stream: RunningStream, progress: StreamProgress, timeout_seconds: float
    ) -> None:
        if progress.is_held_back:
            progress.restart()
        self._pool = pool
        self._stream = stream
        self._progress = progress
        self._responses = stream.client.generate(progress.message(), timeout_seconds)
        self._held: deque[generation_pb2.GenerateResponse] = deque()
        self._has_ended = False

    async def next(self) -> generation_pb2.GenerateResponse | None:
        """Return the next response that the caller gets, or `None` after the last one. Raises the coordinator's error.

        Answers that are held back follow the last response.
        """
        while not self._has_ended:
            response = await self._receive()
            if response is None:
                self._has_ended = True
                break
            self._pool.note_response(self._stream)
            if response.HasField("started"):
                response.started.coordinator = response.started.coordinator or self._stream.coordinator.id
            passed = self._progress.receive(response)
            if passed is not None and not self._progress.is_held_back:
                return passed
            if passed is not None:
                self._held.append(passed)
        return self._held.popleft() if self._held else None

    async def aclose(self) -> None:
        """Cancel the call if it runs."""
        await self._responses.aclose()

    async def _receive(self) -> generation_pb2.GenerateResponse | None:
        """Return the coordinator's next response, or `None` after its last one.

        Raises `NotReady` if the coordinator fell silent and left the cluster or is stalled.
        """
        stream = self._stream
        stream.wait()
        try:
            return await anext(self._responses)
        except StopAsyncIteration:
            return None
        except PilotfishError:
            if not self._progress.is_complete:
                raise
            return None  # the connection was lost after the last response
        except asyncio.CancelledError:
            if not stream.is_given_up():
                raise
            if self._progress.is_complete:
                return None
            reason = "is stalled" if stream.has_moved else "left the cluster"
            raise NotReady(f"coordinator {stream.coordinator.id} {reason}") from None
        finally:
            stream.waiting = None
