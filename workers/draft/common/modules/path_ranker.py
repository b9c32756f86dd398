"""Ranks the candidates of modules that predict all depths at once, with the target's own sampling noise.

A candidate's score is its warped logit, plus the noise at its position in sampled rows. Then the module's selector, if
it has one, ranks the candidates of a depth anew below each candidate of the depth before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.draft.common.modules.product import MakeProduct
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.draft.common.modules.shortlist import Shortlist
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.selector import CANDIDATES, Selector
from workers.sampling.context import DecisionContext
from workers.transfer import lists_together, tensor_on


class PathRanker:
    """Holds the head and the selector's weights in the form that serving needs."""

    def __init__(self, ends: TargetEnds, selector: Selector | None, make: MakeProduct, shortlist: Shortlist) -> None:
        self._shortlist = shortlist
        self._head, self._bias = make(ends.head), None if ends.bias is None else ends.bias.float()
        self._selector = None if selector is None else _SelectorTables(ends, selector, make)

    def rank(self, hidden: Tensor, contexts: Sequence[DecisionContext], siblings: int) -> list[RankedPaths]:
        """Rank the candidates of rows from their vectors for the head, float32 [rows, depths, hidden size].

        `contexts` [rows x depths] are those of the decisions at each depth. At most `siblings` candidates are listed
        below one.
        """
        return self.rank_logits(self.logits(hidden), hidden, contexts, siblings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows x depths, draft vocabulary] of vectors for the head, float32 [rows, depths, hidden size]."""
        logits = self._head(hidden.flatten(0, 1))
        return logits if self._bias is None else logits + self._bias

    def rank_logits(
        self, logits: Tensor, hidden: Tensor, contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        """Rank as `rank` does, from logits [rows x depths, draft vocabulary]; only a selector reads `hidden`."""
        rows, depths, _ = hidden.shape
        leading = self._shortlist.leading(logits, contexts, CANDIDATES)
        scores, columns, totals = (
            part.view(rows, depths, -1) for part in (leading.scores, leading.columns, leading.totals)
        )
        siblings = min(siblings, scores.shape[2])
        first = (scores - totals).exp().nan_to_num_(0.0)  # of rows without any candidate, it is NaN
        read = [self._shortlist.tokens(columns), first[..., :siblings]]
        if self._selector is not None and depths > 1:
            divisors = [1.0 if one.is_greedy else one.sampling.temperature for one in contexts]
            later = self._selector.rank(hidden, scores, columns, tensor_on(hidden.device, divisors, torch.float32))
            found = (later - totals[:, 1:, None]).exp().nan_to_num_(0.0).topk(siblings)
            read += [found.indices, found.values]
        tokens, plain, *reranked = lists_together(read)
        order, confidences = reranked or ([], [])
        listed = list(range(siblings))
        return [
            RankedPaths(
                of_row,
                [[listed], *(order[row] if order else ([listed] for _ in range(depths - 1)))],
                [plain[row][:1], *(confidences[row] if order else ([one] for one in plain[row][1:]))],
            )
            for row, of_row in enumerate(tokens)
        ]


def rank_by_logits(
    shortlist: Shortlist, logits: Tensor, depths: int, contexts: Sequence[DecisionContext], siblings: int
) -> list[RankedPaths]:
    """Rank the candidates of rows from logits [rows x depths, vocabulary], the same below each candidate.

    `contexts` [rows x depths] are those of the decisions. At most `siblings` candidates are listed below one.
    """
    leading = shortlist.leading(logits, contexts, siblings)
    listed = [list(range(leading.columns.shape[1]))]
    shape = (len(logits) // depths, depths, -1)
    read = [shortlist.tokens(leading.columns).view(shape), leading.confidences.view(shape)]
    tokens, confidences = lists_together(read)
    return [
        RankedPaths(of_row, [listed] * depths, [[one] for one in shares])
        for of_row, shares in zip(tokens, confidences, strict=True)
    ]


class _SelectorTables:
    """The selector `h + B SiLU(A [h; e])`, with its products by the embedding and by the head computed beforehand.

    Each table has `rank` values for each token of the head. With them the selector's correction of a candidate, given
    the candidate before, is one scalar product of width `rank`.
    """

    def __init__(self, ends: TargetEnds, selector: Selector, make: MakeProduct) -> None:
        size = ends.hidden_size
        inner, outer = selector.inner.weight.detach(), selector.outer.weight.detach()
        embedding = ends.embedding if ends.vocabulary is None else ends.embedding[ends.vocabulary]
        self._of_hidden = make(inner[:, :size].contiguous())
        self._of_previous = embedding.to(inner.dtype) @ inner[:, size:].T  # [draft vocabulary, rank]
        self._of_head = ends.head.to(outer.dtype) @ outer  # [draft vocabulary, rank]

    def rank(self, hidden: Tensor, scores: Tensor, columns: Tensor, divisors: Tensor) -> Tensor:
        """Scores [rows, depths - 1, candidates before, candidates] of all depths but the first.

        `scores` and `columns` are [rows, depths, candidates], `divisors` [rows x depths] the temperatures. The mass of
        all candidates together is kept: the selector distributes it anew among them.
        """
        rows, depths, _ = scores.shape
        own = self._of_hidden(hidden[:, 1:].flatten(0, 1)).view(rows, depths - 1, 1, -1)
        inner = torch.nn.functional.silu(own + self._of_previous[columns[:, :-1]])
        outer = self._of_head[columns[:, 1:]].float()  # [rows, depths - 1, candidates, rank]
        corrections = inner @ outer.transpose(-1, -2)
        plain = scores[:, 1:].unsqueeze(2)
        corrected = plain + corrections / divisors.view(rows, depths, 1, 1)[:, 1:]
        return corrected + (plain.logsumexp(dim=-1, keepdim=True) - corrected.logsumexp(dim=-1, keepdim=True))
