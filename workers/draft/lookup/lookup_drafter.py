"""A drafter that drafts from possible continuations of the text, without a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget
from cluster.core.request import SequenceStart
from workers.draft.lookup.continuation_tree import Continuation, ContinuationTree, Estimate, merge
from workers.draft.lookup.sequence_drafter import DraftedSession, EstimatingDrafter, Reliability


class LookupSession(DraftedSession):
    """Committed tokens whose possible continuations are known."""

    __slots__ = ()

    @abstractmethod
    def continuations(self, forced: Sequence[int], length: int) -> Sequence[Continuation]:
        """Possible continuations of the committed tokens and the tokens `forced`, of at most `length` tokens."""

    def drafts(self, length: int) -> Sequence[Continuation]:
        """Possible continuations of at most `length` tokens, which begin with those that the grammar forces."""
        forced = self.next_tokens.forced
        if len(forced) >= length:
            return [Continuation(forced[:length], 0)]
        found = self.continuations(forced, length - len(forced))
        if not forced:
            return found
        found = found or [Continuation((), 0)]
        return [Continuation((*forced, *one.tokens), one.match_length - len(forced), one.origin) for one in found]


SessionType = TypeVar("SessionType", bound=LookupSession)


class LookupDrafter(EstimatingDrafter[SessionType]):
    """Drafts the most probable continuations of each row's session. It is a `DraftMethod`.

    `rate` maps the length of a match to the probability assumed for the only token that follows it. Estimates are
    corrected by what the target takes, separately for greedy and sampled decoding.
    """

    def __init__(
        self,
        create: Callable[[SequenceStart], SessionType],
        draft: DraftSection,
        rate: Callable[[int], float],
        discard: Callable[[SessionType], None] = lambda _: None,
    ) -> None:
        super().__init__(create, draft, discard)
        self._rate = rate

    def _draft(self, session: SessionType, budget: DraftBudget, reliability: Reliability) -> ContinuationTree:
        ends, estimate = session.start.sampling.end_token_ids, self._estimate(reliability)
        drafts = session.drafts(budget.max_depth)
        return merge(drafts, budget.max_nodes, budget.max_depth, estimate, ends, session.next_tokens)

    def _estimate(self, reliability: Reliability) -> Estimate:
        rate = self._rate

        def estimate(weight: float, total: float, match_length: int) -> float:
            # The rate is that of one occurrence: 1 / (1 + doubt). Each further one that agrees makes it more certain.
            doubt = 1.0 / rate(match_length) - 1.0
            return reliability.probability(weight / (total + doubt))

        return estimate
