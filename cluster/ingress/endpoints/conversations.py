"""Conversations that later requests continue. They are kept in the memory of this process, within bounds."""

from __future__ import annotations

import json
from collections import OrderedDict

from cluster.core.errors import InvalidRequest
from cluster.ingress.openai.parsing.parts import Json

MAX_STORED = 1024
"""Most conversations that are kept."""
MAX_STORED_CHARS = 1 << 24
"""Most characters of all conversations that are kept."""


class Conversations:
    """The latest conversations by the id of their last response, and the key of the client that may continue them."""

    def __init__(self, most: int = MAX_STORED, most_chars: int = MAX_STORED_CHARS) -> None:
        self._most = most
        self._most_chars = most_chars
        self._chars = 0
        self._stored: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def keep(self, response_id: str, client: str, turns: list[Json]) -> None:
        """Keep a conversation. The oldest ones are dropped to make room."""
        text = json.dumps(turns, ensure_ascii=False)
        self._stored[response_id] = (client, text)
        self._chars += len(text)
        while self._stored and (len(self._stored) > self._most or self._chars > self._most_chars):
            _, (_, dropped) = self._stored.popitem(last=False)
            self._chars -= len(dropped)

    def find(self, response_id: str, client: str) -> list[Json]:
        """Return the messages up to a response. Raises `InvalidRequest` (`previous_response_id`)."""
        owner, text = self._stored.get(response_id, ("", ""))
        if not text or owner != client:
            raise InvalidRequest(
                "previous_response_id", response_id, "the id of a response that this server still keeps"
            )
        turns: list[Json] = json.loads(text)
        return turns
