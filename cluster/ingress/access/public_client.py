"""The client behind both APIs of an ingress: it holds callers to their limits, and tells them nothing internal."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cluster.core.config.server import ClientLimitsSection
from cluster.core.errors import PilotfishError
from cluster.core.ids import check_request_id
from cluster.ingress.access.key_limits import ClientUses
from cluster.ingress.client import FullClient
from pilotfish.v1 import generation_pb2

logger = logging.getLogger(__name__)

LimitsOf = Callable[[str], ClientLimitsSection]
"""Returns the limits of the client with a name, as they are now."""
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class PublicClient:
    """Passes every call on to `client`, and refuses requests of clients that have used what they may.

    Messages of errors that may name processes, addresses or files are logged and replaced. A request names its client;
    one without a name comes from the cluster itself or from a cluster without API keys, and is not limited.
    """

    def __init__(self, client: FullClient, limits_of: LimitsOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._limits_of = limits_of
        self._clock = clock
        self._uses = ClientUses()
        # Calls without limits.
        self.abort = _public(client.abort)
        self.tokenize = _public(client.tokenize)
        self.detokenize = _public(client.detokenize)
        self.list_models = _public(client.list_models)
        self.get_model = _public(client.get_model)
        self.metrics = _public(client.metrics)
        self.is_ready = client.is_ready
        self.is_reachable = client.is_reachable
        self.close = client.close

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses of one request. Raises `RateLimited`, and the errors of the client.

        Raises `InvalidRequest` (`request_id`) for an id that is none before anything names the request by it.
        """
        if request.HasField("request_id"):
            check_request_id(request.request_id)
        name = request.client
        use = self._uses.of(name, self._limits_of(name), self._clock()) if name else None
        returned = max(1, request.n)
        answers = max(returned, request.best_of)
        if use is not None:
            use.enter(name, answers, self._clock())
        try:
            with _public_errors(request.request_id):
                async with aclosing(self._client.generate(request, timeout_seconds)) as responses:
                    async for response in responses:
                        if use is not None:
                            use.count(_tokens(response, returned, answers), self._clock())
                        yield response
        finally:
            if use is not None:
                use.leave(answers)


def _public(
    call: Callable[_Arguments, Coroutine[Any, Any, _Answer]],
) -> Callable[_Arguments, Coroutine[Any, Any, _Answer]]:
    """Return the call, with errors that clients may read."""

    @wraps(call)
    async def public(*values: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        with _public_errors():
            return await call(*values, **named)

    return public


@contextmanager
def _public_errors(request_id: str = "") -> Iterator[None]:
    """Replace the message of an error that clients may not read, and log it."""
    try:
        yield
    except PilotfishError as error:
        public = error.without_internals()
        if public is error:
            raise
        logger.warning("request %s: %s: %s", request_id or "-", type(error).__name__, error)
        raise public from error


def _tokens(response: generation_pb2.GenerateResponse, returned: int, generated: int) -> int:
    """Return the number of tokens that a response reports for the first time.

    Answers that are generated and not returned count as many tokens as the returned ones have on average.
    """
    if response.HasField("started"):
        return int(response.started.prompt_tokens)
    return -(-len(response.delta.token_ids) * generated // returned)
