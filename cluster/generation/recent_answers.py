"""The tokens of recent answers, so that a resumed request need not generate them again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from cluster.core.request import GenerationRequest

MAX_STORED_TOKENS = 1 << 20
"""Most tokens of all stored answers together: 4 MiB."""
MAX_STORED_REQUESTS = 4096

RequestKey = bytes
"""A hash of all that an answer depends on, and of the request's id."""


def request_key(request: GenerationRequest) -> RequestKey:
    """Return the key of a request: equal only for requests with one id that have the same answers.

    All fields count but those named here, so that a new one is never forgotten.
    """
    stopping = request.stopping
    counted = replace(
        request,
        # How and when the answer is computed, not which one.
        deadline=None,
        priority=0,
        traceparent="",
        max_draft_tokens=None,
        prediction=(),
        returns_drafts=False,
        streams=True,
        allows_learning=False,
        resumed=(),
        client="",  # a part of the id
        # A longer answer begins with the shorter one, unless its last token is forced.
        stopping=replace(
            stopping,
            max_tokens=0 if stopping.forced_eos_token_id is None else stopping.max_tokens,
            stop_token_ids=frozenset(),
        ),
        # What follows has other forms: the order of a set is not its content, and the text of many tokens is long.
        prompt=(),
        source=(),
    )
    tokens = [request.prompt, request.source, tuple(sorted(stopping.stop_token_ids))]
    digest = blake2b(repr((counted, [*map(len, tokens)])).encode(errors="surrogatepass"), digest_size=16)
    for part in tokens:
        digest.update(array("I", part).tobytes())
    return digest.digest()


class RecentAnswers:
    """A bounded store. When it is full, the requests that were written to least recently are dropped."""

    def __init__(self, max_tokens: int = MAX_STORED_TOKENS, max_requests: int = MAX_STORED_REQUESTS) -> None:
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._tokens = 0
        self._stored: OrderedDict[RequestKey, tuple[array[int], ...]] = OrderedDict()

    @property
    def token_count(self) -> int:
        """Number of stored tokens."""
        return self._tokens

    def tokens(self, key: RequestKey, index: int) -> Sequence[int]:
        """Return the first tokens of an answer, as far as they are stored."""
        stored = self._stored.get(key, ())
        return stored[index] if index < len(stored) else ()

    def begin(self, key: RequestKey, answers: Sequence[Sequence[int]]) -> None:
        """Store the first tokens of each answer of a request. They replace what is stored of it."""
        self._remove(key)
        self._stored[key] = tuple(array("I", tokens) for tokens in answers)
        self._tokens += sum(map(len, answers))
        self._make_room()

    def append(self, key: RequestKey, index: int, tokens: Sequence[int]) -> None:
        """Add tokens to an answer. Does nothing if its request was dropped or has no such answer."""
        stored = self._stored.get(key, ())
        if index < len(stored):
            self._stored.move_to_end(key)
            stored[index].extend(tokens)
            self._tokens += len(tokens)
            self._make_room()

    def _make_room(self) -> None:
        while self._stored and (self._tokens > self._max_tokens or len(self._stored) > self._max_requests):
            self._remove(next(iter(self._stored)))

    def _remove(self, key: RequestKey) -> None:
        self._tokens -= sum(map(len, self._stored.pop(key, ())))
