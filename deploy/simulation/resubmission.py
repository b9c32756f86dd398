"""A router over several coordinators that takes them in turn and resubmits a request whose coordinator was lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from cluster.core.errors import DeadlineExceeded, NotReady, WorkerUnavailable
from deploy.simulation.virtual_time import now
from pilotfish.v1 import generation_pb2

PAUSE_SECONDS = 0.05


class GeneratesAnswers(Protocol):
    """A client of the public service."""

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of one request."""
        ...


class RoundRobinRouter:
    """Takes the members in turn. A client sees a pause when one is lost, never a changed or repeated token."""

    def __init__(self, members: Sequence[GeneratesAnswers], first: int = 0) -> None:
        self._members = members
        self._next = first

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of one request. Raises `DeadlineExceeded`, and what the service refuses."""
        deadline = now() + timeout_seconds
        delivered = Counter[int]()
        ended: set[int] = set()
        attempt = 0
        while True:
            member = self._members[self._next % len(self._members)]
            self._next += 1
            attempt += 1
            sent = generation_pb2.GenerateRequest()
            sent.CopyFrom(request)
            sent.request_id = f"{request.request_id}:{attempt}"
            try:
                async with aclosing(member.generate(sent, deadline - now())) as responses:
                    async for response in self.after(responses, delivered, ended, is_first=attempt == 1):
                        yield response
            except (NotReady, WorkerUnavailable):
                if now() + PAUSE_SECONDS >= deadline:
                    raise DeadlineExceeded("the deadline passed while no coordinator could answer") from None
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                return

    async def after(
        self,
        responses: AsyncGenerator[generation_pb2.GenerateResponse, None],
        delivered: Counter[int],
        ended: set[int],
        *,
        is_first: bool,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield what comes after the tokens that were delivered, and count it as delivered."""
        left = Counter(delivered)
        async for response in responses:
            index = response.index
            match response.WhichOneof("event"):
                case "started":
                    if not is_first:
                        continue
                case "delta":
                    dropped = min(left[index], len(response.delta.token_ids))
                    left[index] -= dropped
                    if dropped:
                        rest = response.delta.token_ids[dropped:]
                        del response.delta.token_ids[:]
                        response.delta.token_ids.extend(rest)
                    if not response.delta.token_ids:
                        continue
                    delivered[index] += len(response.delta.token_ids)
                case "finished":
                    if index in ended:
                        continue
                    ended.add(index)
            yield response
