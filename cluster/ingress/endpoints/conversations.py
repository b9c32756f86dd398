"""Conversations that later requests continue. They are kept in the memory of this process, within bounds."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict

from cluster.core.errors import InvalidRequest
from cluster.ingress.openai.parsing.parts import Json

MAX_STORED = 1024
"""Most conversations that are kept."""
MAX_STORED_CHARS = 1 << 24
"""Most characters of all conversations that are kept."""


class Conversations:
    """The latest conversations by the id of their last response, and the name of the client that may continue them.

    Room is taken from the client that has the most, so that nobody drops the conversations of others.
    """

    def __init__(self, most: int = MAX_STORED, most_chars: int = MAX_STORED_CHARS) -> None:
        self._most = most
        self._most_chars = most_chars
        self._chars = 0
        self._stored: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def keep(self, response_id: str, client: str, turns: list[Json]) -> None:
        """Keep a conversation. The oldest ones of the client that has the most are dropped to make room."""
        text = json.dumps(turns, ensure_ascii=False)
        self._stored[response_id] = (client, text)
        self._chars += len(text)
        while self._stored and (len(self._stored) > self._most or self._chars > self._most_chars):
            largest = self._largest()
            oldest = next(one for one, (owner, _) in self._stored.items() if owner == largest)
            self._chars -= len(self._stored.pop(oldest)[1])

    def find(self, response_id: str, client: str) -> list[Json]:
        """Return the messages up to a response. Raises `InvalidRequest` (`previous_response_id`)."""
        owner, text = self._stored.get(response_id, ("", ""))
        if not text or owner != client:
            raise InvalidRequest(
                "previous_response_id", response_id, "the id of a response that this server still keeps"
            )
        turns: list[Json] = json.loads(text)
        return turns

    def _largest(self) -> str:
        """The client with the largest share of what may be kept."""
        shares: Counter[str] = Counter()
        for owner, text in self._stored.values():
            shares[owner] += self._most_chars + self._most * len(text)
        return max(shares, key=lambda owner: shares[owner])
