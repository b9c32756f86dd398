"""The order in which waiting sequences start: fair among flows, as pure functions of frozen values.

A flow is a client, or a request where clients have no names. Each sequence of a flow gets a turn, in tokens of a
virtual time, so that every flow gets an equal share of the tokens, and a flow that sends many sequences waits for
itself (start-time fair queueing, Goyal et al. 1996). A turn never changes. Sequences that arrive later than another one
started never precede it, so the oldest running sequence stays the oldest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.core.ids import RequestId

_NUMBER = re.compile(r"-[0-9]+$")

EXPECTED_ANSWER_TOKENS = 256
"""Most tokens for which an answer counts before it ends. Clients often allow far more than the answer then has."""


@dataclass(frozen=True, slots=True)
class FairQueue:
    """The virtual time, and up to which time each flow has had its share."""

    now: int = 0
    """The virtual time, in tokens: no sequence that starts from now on had an earlier turn."""
    used: Mapping[str, int] = field(default_factory=dict)
    """The end of the last turn of each flow that is ahead of the virtual time."""

    def enter(self, flow: str, cost: int) -> tuple[int, FairQueue]:
        """Return the turn of a flow's next sequence, and the queue after it."""
        turn = max(self.now, self.used.get(flow, 0))
        return turn, replace(self, used={**self.used, flow: turn + cost})

    def leave(self, flow: str, end: int = 0) -> FairQueue:
        """Return the queue after a waiting sequence of a flow has left without a start.

        `end` is the end of the last of the flow's turns that have started or still wait; 0 without one.
        """
        used = {name: until for name, until in self.used.items() if name != flow}
        if end > self.now:
            used[flow] = end
        return replace(self, used=used)

    def start(self, turn: int, cost: int, flows: int) -> FairQueue:
        """Return the queue after a sequence has started, while sequences of `flows` flows waited.

        The virtual time passes with the share of one flow, so that nobody waits for ever for flows that are new.
        """
        now = max(self.now, turn) + -(-cost // max(1, flows))
        return FairQueue(now, {flow: used for flow, used in self.used.items() if used > now})


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A live request, for the choice of what a full queue refuses."""

    id: RequestId
    flow: str
    slots: int
    """Most sequences that it runs at a time."""
    has_begun: bool
    """Whether one of its sequences has started."""
    priority: int = 0
    """Requests with a lower priority start earlier."""


def flow_of(client: str, request_id: RequestId) -> str:
    """Return the flow of a request: its client, or the request itself where clients have no names.

    The prompts of one HTTP request have its id and a number behind a hyphen.
    """
    return client or f"/{_NUMBER.sub('', request_id)}"


def displaced(requests: Iterable[QueuedRequest], flow: str, slots: int, excess: int) -> tuple[RequestId, ...]:
    """Return the requests that make room for a new one in a full queue; none if it is the new one that must wait.

    `requests` are in order of arrival. The new request belongs to `flow` and needs `slots`; `excess` of all slots are
    too many. Requests leave, the latest first, of flows that hold as many slots as the new one's flow even without
    them, and only such as have not begun.
    """
    held: Counter[str] = Counter()
    waiting: dict[str, list[QueuedRequest]] = {}
    for one in requests:
        held[one.flow] += one.slots
        if not one.has_begun:
            waiting.setdefault(one.flow, []).append(one)
    own, found = held[flow] + slots, []
    while excess > 0:
        largest = max(waiting, key=lambda name: held[name], default=flow)
        if largest == flow or held[largest] - waiting[largest][-1].slots < own:
            return ()
        latest = waiting[largest].pop()
        if not waiting[largest]:
            del waiting[largest]
        held[largest] -= latest.slots
        excess -= latest.slots
        found.append(latest.id)
    return tuple(found)


def outranked(requests: Iterable[QueuedRequest], priority: int, excess: int) -> tuple[RequestId, ...]:
    """Return the requests of lower rank that make room for a new one in a full queue; none if they are too few.

    `requests` are in order of arrival. Requests leave that have a higher `priority` than the new one and have not
    begun: those with the highest first, of these the latest.
    """
    waiting = [one for one in reversed(list(requests)) if one.priority > priority and not one.has_begun]
    found = []
    for one in sorted(waiting, key=lambda one: -one.priority):
        if excess <= 0:
            break
        excess -= one.slots
        found.append(one.id)
    return () if excess > 0 else tuple(found)


def expected_cost(prompt_tokens: int, max_tokens: int) -> int:
    """Return for how many tokens a sequence counts."""
    return prompt_tokens + min(max_tokens, EXPECTED_ANSWER_TOKENS)
