"""Distributions of rejection sampling: the draft's, and what rejections leave of the target's; and draws from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from cluster.core.drafting import DraftDistribution
from cluster.core.tree import TokenTree


def draft_probabilities(
    tree: TokenTree, node: int, distributions: Sequence[DraftDistribution], rejected: Collection[int] = ()
) -> Mapping[int, float]:
    """The distribution that the token of `node` was drawn from, by token.

    It is the node's distribution without the tokens of its earlier siblings, `rejected`, and normalised. A node of a
    tree without `distributions` is deterministic. Empty if the distribution has no other tokens.
    """
    if not distributions:
        return {tree.tokens[node]: 1.0}
    stated = distributions[node]
    kept = {
        token: probability
        for token, probability in zip(stated.tokens, stated.probabilities, strict=True)
        if token not in rejected
    }
    total = sum(kept.values())
    return {token: probability / total for token, probability in kept.items()} if total > 0.0 else {}


def residual(target: Tensor, draft: Mapping[int, float]) -> Tensor:
    """max(p − q, 0) for the target's probabilities [vocab], float64, and the draft's; not normalised.

    Tokens of the draft that the target does not have are left out: the target's probability of them is 0.
    """
    shared = [(token, probability) for token, probability in draft.items() if token < len(target)]
    tokens = torch.tensor([token for token, _ in shared], dtype=torch.int64, device=target.device)
    amounts = torch.tensor([-probability for _, probability in shared], dtype=target.dtype, device=target.device)
    return target.index_add(0, tokens, amounts).clamp_(min=0.0)


def draw(weights: Tensor, number: float) -> int:
    """The index at which the cumulated `weights` [size], float64 and not negative, exceed `number` times their sum.

    With a uniform `number`, each index is drawn with a probability in proportion to its weight. Returns -1 if all
    weights are 0.
    """
    cumulated = weights.cumsum(0)
    total = float(cumulated[-1])
    if not total > 0.0:
        return -1
    # Rounding may make the product equal to the sum; the last index with a weight is then drawn.
    found = int(torch.searchsorted(cumulated, number * total, right=True))
    return found if found < len(weights) else int(weights.nonzero()[-1])
