"""All drafters together: who serves whom, and proposals for those that get one in time. Never an error."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from cluster.coordinator.clients.drafter import Ask, Call, DrafterLink, Proposals
from cluster.coordinator.metrics import Metrics
from cluster.core.config import DraftSection
from cluster.core.drafting import NO_DRAFT
from cluster.core.ids import SequenceId
from cluster.core.ports import Drafter
from cluster.core.sequence import Sequence as Answer

LONG_TOKENS = 64
"""Who has more to tell a drafter than this tells it in the background: a prompt must not hold the others up."""
TELLING_TOKENS = 512
"""So many are told in one call, so that a drafter can serve others in between."""
_FADING = 0.9
"""Of what telling took, with each call that follows."""


class Calls:
    """What was asked of several drafters at once."""

    def __init__(self, calls: Mapping[DrafterLink, Call], timeout: float, metrics: Metrics) -> None:
        self._calls = calls
        self._timeout = timeout
        self._metrics = metrics

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def done(self) -> bool:
        """Whether all have answered or failed."""
        return all(call.done() for call in self._calls.values())

    @property
    def seconds(self) -> float:
        """Of the slowest that has answered."""
        return max((call.result().seconds for call in self._calls.values() if _has_ended(call)), default=0.0)

    async def wait(self, patience: float) -> None:
        """Return when all have answered, or after `patience` seconds, or the configured timeout.

        Only the timeout opens breakers.
        """
        if not self._calls:
            return
        await asyncio.wait(self._calls.values(), timeout=min(patience, self._timeout))
        for link, call in self._calls.items():
            if not call.done():
                self._metrics.drafter_fallback("late")
                if patience >= self._timeout:
                    link.late()

    def take(self) -> Proposals:
        """What has come by now."""
        proposals: Proposals = {}
        for call in self._calls.values():
            if _has_ended(call):
                mine = call.result().proposals
                if mine is None:
                    self._metrics.drafter_fallback("failed")
                proposals.update(mine or {})
        return proposals


def _has_ended(call: Call) -> bool:
    return call.done() and not call.cancelled()


class Drafting:
    """Spreads sequences over drafters: the least loaded takes the next, and keeps it while it lives.

    A drafter that fails is left to its breaker, and its sequences move to the others; when it is due for a try, it gets
    one sequence to try with, and once it answers, its share again.
    """

    def __init__(
        self, drafters: Sequence[Drafter], section: DraftSection, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._links = tuple(DrafterLink(drafter, section, metrics, clock) for drafter in drafters)
        self._timeout = section.timeout_seconds
        self._metrics = metrics
        self._homes: dict[SequenceId, DrafterLink] = {}
        self._loads = Counter[DrafterLink]()
        self._telling: dict[DrafterLink, Call] = {}
        self._told_tokens = self._told_seconds = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return not any(link.is_calling for link in self._links)

    def start(self, asks: Sequence[Ask], vocabulary_size: int) -> Calls:
        """Ask every sequence's drafter, all at once. Who is busy, refused or long untold goes without."""
        self._try_again(asks, vocabulary_size)
        parts: dict[DrafterLink, list[Ask]] = {}
        reasons: set[str] = set()
        for ask in asks:
            link = self._home(ask.answer)
            if link is None:
                reasons.add("busy" if any(link.is_calling for link in self._links) else "open")
            elif link.is_busy(ask.answer.id):
                reasons.add("busy")
            elif link.untold(ask.answer) > LONG_TOKENS:
                reasons.add("untold")
            elif not link.refuses(ask.answer.id):
                parts.setdefault(link, []).append(ask)
        for reason in sorted(reasons):
            self._metrics.drafter_fallback(reason)
        calls = {link: link.start(part, vocabulary_size) for link, part in parts.items()}
        return Calls(calls, self._timeout, self._metrics)

    def knows(self, answer: Answer) -> bool:
        """Whether its drafter knows enough of a sequence to be asked for it."""
        link = self._home(answer)
        return link is not None and link.untold(answer) <= LONG_TOKENS

    def tell(self, answers: Iterable[Answer], vocabulary_size: int) -> Calls:
        """Let drafters learn, in the background, sequences of which they know too little to be asked."""
        answers = tuple(answers)
        self._try_again([Ask(answer, NO_DRAFT) for answer in answers], vocabulary_size)
        self._telling = {link: call for link, call in self._telling.items() if not call.done()}
        parts: dict[DrafterLink, list[Ask]] = {}
        tokens = Counter[DrafterLink]()
        for answer in answers:
            link = self._home(answer)
            if link is None or link.untold(answer) <= LONG_TOKENS or link.is_busy(answer.id) or link.refuses(answer.id):
                continue
            if link not in self._telling and tokens[link] < TELLING_TOKENS:
                tokens[link] += link.untold(answer)
                parts.setdefault(link, []).append(Ask(answer, NO_DRAFT))
        calls = {link: link.start(part, vocabulary_size) for link, part in parts.items()}
        for link, call in calls.items():
            call.add_done_callback(partial(self._note_told, tokens[link]))
        self._telling |= calls
        return Calls(calls, self._timeout, self._metrics)

    def telling_seconds(self, answer: Answer) -> float:
        """What it is likely to take until a drafter knows enough of the sequence; 0 where nobody knows."""
        link = self._home(answer)
        untold = 0 if link is None else link.untold(answer)
        if untold <= LONG_TOKENS or not self._told_tokens:
            return 0.0
        return untold * self._told_seconds / self._told_tokens

    def _note_told(self, tokens: int, call: Call) -> None:
        if _has_ended(call) and call.result().proposals is not None:
            self._told_tokens = self._told_tokens * _FADING + tokens
            self._told_seconds = self._told_seconds * _FADING + call.result().seconds

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The sequences are over."""
        sequence_ids = tuple(sequence_ids)
        for sequence_id in sequence_ids:
            self._leave_home(sequence_id)
        for link in self._links:
            link.forget(sequence_ids)

    async def close(self, timeout_seconds: float) -> None:
        """End the calls under way and send the last releases."""
        await asyncio.gather(*(link.close(timeout_seconds) for link in self._links))

    def _home(self, answer: Answer) -> DrafterLink | None:
        """The drafter that serves the sequence; `None` while none can."""
        living = [link for link in self._links if link.breaker.closed]
        if not living:
            return None
        home = self._homes.get(answer.id)
        least = min(living, key=self._loads.__getitem__)
        if home is None or not home.breaker.closed or self._loads[home] > self._loads[least] + 1:
            self._leave_home(answer.id)
            self._loads[least] += 1
            self._homes[answer.id] = home = least
        return home

    def _try_again(self, asks: Sequence[Ask], vocabulary_size: int) -> None:
        """Drafters that failed and are due get a call that nobody waits for."""
        for link in self._links:
            if link.breaker.closed or link.is_calling or not asks or not link.breaker.due():
                continue
            free = [ask for ask in asks if not link.refuses(ask.answer.id)]
            if free:
                link.start(free if len(self._links) == 1 else free[-1:], vocabulary_size)

    def _leave_home(self, sequence_id: SequenceId) -> None:
        home = self._homes.pop(sequence_id, None)
        if home is not None:
            self._loads[home] -= 1
