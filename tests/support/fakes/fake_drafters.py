"""Fake drafters: right, wrong, slow, failing, forgetful or invalid."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from cluster.core.drafting import DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.errors import DrafterUnavailable
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.fakes.fake_target import FakeTarget


class FakeDrafter:
    """Drafts nothing. Stores the tokens of its rows as the port requires, and returns a fault if tokens are missing."""

    def __init__(self, target: FakeTarget) -> None:
        self.target = target
        self.known: dict[SequenceId, tuple[SequenceStart, list[int]]] = {}
        """The start and the tokens of each sequence that was not released."""
        self.calls: list[tuple[DraftRow, ...]] = []
        """The rows of every call."""

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        self.calls.append(tuple(rows))
        await self.before_answer()
        return tuple(self.answer(row) for row in rows)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await asyncio.sleep(0)
        for sequence_id in sequence_ids:
            self.known.pop(sequence_id, None)

    async def before_answer(self) -> None:
        """A hook before the answer: a subclass waits or fails here."""
        await asyncio.sleep(0)

    def answer(self, row: DraftRow) -> Proposal:
        """Store the new tokens, then draft."""
        if row.start is not None and row.known_len == 0:
            self.known[row.sequence_id] = (row.start, [])
        if row.sequence_id not in self.known or len(self.known[row.sequence_id][1]) < row.known_len:
            fault = RowFault(RowFaultCode.OUT_OF_SYNC, "tokens are missing")
            return Proposal(row.sequence_id, row.base_len, fault=fault)
        start, tokens = self.known[row.sequence_id]
        tokens[row.known_len :] = row.new_tokens
        return Proposal(row.sequence_id, row.base_len, self.draft(start.sampling, tokens, row))

    def draft(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A tree below `tokens`."""
        return EMPTY_TREE


class WrongDrafter(FakeDrafter):
    """Drafts chains whose first token is always wrong."""

    def draft(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A chain as long as the budget allows."""
        length = min(row.budget.max_nodes, row.budget.max_depth)
        wrong = (self.target.next_token(tokens, sampling) + 1) % self.target.vocabulary_size
        return TokenTree.chain([wrong] * length)


class PerfectDrafter(FakeDrafter):
    """Drafts chains that are always accepted."""

    def draft(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A chain of the tokens that the target will decide."""
        chain = list(tokens)
        for _ in range(min(row.budget.max_nodes, row.budget.max_depth)):
            chain.append(self.target.next_token(chain, sampling))
        return TokenTree.chain(chain[len(tokens) :])


class RandomDrafter(FakeDrafter):
    """Drafts random trees in which the right token is often among the children."""

    def __init__(self, target: FakeTarget, seed: int = 0) -> None:
        super().__init__(target)
        self.random = random.Random(seed)

    def draft(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A tree whose branches agree with the target up to a random depth."""
        candidates: list[list[int]] = []
        for _ in range(self.random.randrange(4)):
            path = list(tokens)
            for _ in range(self.random.randrange(row.budget.max_depth + 1)):
                right = self.target.next_token(path, sampling)
                path.append(right if self.random.random() < 0.7 else self.random.randrange(self.target.vocabulary_size))
            candidates.append(path[len(tokens) :])
        return TokenTree.from_candidates(candidates, row.budget.max_nodes)


class SlowDrafter(PerfectDrafter):
    """Answers after `delay` seconds."""

    def __init__(self, target: FakeTarget, delay: float) -> None:
        super().__init__(target)
        self.delay = delay

    async def before_answer(self) -> None:
        await asyncio.sleep(self.delay)


class FailingDrafter(PerfectDrafter):
    """Is unavailable while `is_down`, and has no sequence afterwards."""

    is_down = True

    async def before_answer(self) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            self.known.clear()
            raise DrafterUnavailable("connection refused")


class MortalDrafter(PerfectDrafter):
    """Dies of every draft for a sequence with the seed `fatal`, and starts again at once, empty."""

    def __init__(self, target: FakeTarget, fatal: int | None) -> None:
        super().__init__(target)
        self.fatal = fatal
        self.deaths = 0

    def draft(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """Die of a fatal row."""
        if sampling.seed == self.fatal and row.budget.max_nodes:
            self.deaths += 1
            self.known.clear()
            raise DrafterUnavailable("connection reset", had_call=True)
        return super().draft(sampling, tokens, row)


class BuggyDrafter(PerfectDrafter):
    """Raises an error that the port does not allow."""

    async def before_answer(self) -> None:
        raise ZeroDivisionError("a bug in the drafter")


class ForgetfulDrafter(PerfectDrafter):
    """Loses some sequences before every answer."""

    def __init__(self, target: FakeTarget, seed: int = 0) -> None:
        super().__init__(target)
        self.random = random.Random(seed)

    async def before_answer(self) -> None:
        await asyncio.sleep(0)
        for sequence_id in list(self.known):
            if self.random.random() < 0.3:
                del self.known[sequence_id]


class InvalidDrafter(RandomDrafter):
    """Sends stale lengths, trees beyond the budget, tokens beyond the vocabulary, and answers for unknown sequences."""

    def answer(self, row: DraftRow) -> Proposal:
        """A valid proposal in one of five cases."""
        valid = super().answer(row)
        match self.random.randrange(5):
            case 0:
                return Proposal(row.sequence_id, row.base_len - 1, TokenTree.chain([1, 2]))
            case 1:
                return Proposal(row.sequence_id, row.base_len, TokenTree.chain(range(20)))
            case 2:
                return Proposal(row.sequence_id, row.base_len, TokenTree.chain([self.target.vocabulary_size]))
            case 3:
                return Proposal(SequenceId("unknown"), row.base_len, EMPTY_TREE)
        return valid
