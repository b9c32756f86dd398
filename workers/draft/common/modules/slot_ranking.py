"""Ranks candidates of slots from left to right: what is known of a slot depends on the tokens drafted before it.

The most probable candidates of a depth are the parents of the next one; with one sibling they are a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.draft.common.modules.ranked_paths import MOST_PARENTS, RankedPaths
from workers.draft.common.modules.shortlist import Shortlist
from workers.sampling.context import DecisionContext
from workers.transfer import lists_together


class Slots(Protocol):
    """The slots of some rows. Each depth is asked for once, in order."""

    def logits(self, depth: int, previous: Tensor) -> Tensor:
        """Logits [rows, parents, draft vocabulary] of a slot below each token of `previous` [rows, parents]."""

    def confidences(self, found: Tensor) -> Tensor:
        """The probabilities of the slot's candidates; `found` are those by its logits, [rows, parents, siblings]."""

    def follow(self, origins: Tensor) -> None:
        """Go on with new parents: each is below the parent `origins` [rows, parents] of the depth before, by index."""


def rank_slots(
    slots: Slots, shortlist: Shortlist, last: Tensor, contexts: Sequence[DecisionContext], siblings: int
) -> list[RankedPaths]:
    """Rank the candidates of rows after their last tokens, int64 [rows].

    `contexts` [rows x depths] are those of the decisions at each depth. At most `siblings` candidates are listed below
    one.
    """
    rows = len(last)
    depths, previous = len(contexts) // rows, last.unsqueeze(1)  # [rows, parents]
    paths = torch.zeros(rows, 1, device=last.device)
    levels: list[tuple[Tensor, Tensor]] = []
    kept: list[Tensor] = []
    for depth in range(depths):
        parents = previous.shape[1]
        logits = slots.logits(depth, previous)
        each = [contexts[row * depths + depth] for row in range(rows) for _ in range(parents)]
        leading = shortlist.leading(logits.flatten(0, 1), each, siblings)
        tokens = shortlist.tokens(leading.columns).view(rows, parents, -1)
        found = slots.confidences(leading.confidences.view(rows, parents, -1))
        levels.append((tokens, found))
        if depth + 1 == depths:
            break
        scores = (paths.unsqueeze(2) + found.log()).flatten(1)
        paths, places = scores.topk(min(MOST_PARENTS if siblings > 1 else 1, scores.shape[1]))
        kept.append(places)
        previous = tokens.flatten(1).gather(1, places)
        slots.follow(places // tokens.shape[2])
    return listed_paths(levels, kept)


def listed_paths(levels: Sequence[tuple[Tensor, Tensor]], kept: Sequence[Tensor]) -> list[RankedPaths]:
    """The ranked paths of each row from tokens and confidences [rows, parents, siblings] of each depth.

    `kept` [rows, parents] are the candidates of a depth, by index, that are the parents of the next one.
    """
    depths = len(levels)
    read = lists_together([*(level[part] for part in (0, 1) for level in levels), *kept])
    tokens, confidences, parents = read[:depths], read[depths : 2 * depths], read[2 * depths :]
    found = []
    for row in range(len(tokens[0])):
        order: list[list[list[int]]] = []
        sure: list[list[list[float]]] = []
        for depth, of_depth in enumerate(tokens):
            siblings = len(of_depth[row][0])
            before = sum(map(len, tokens[depth - 1][row])) if depth else 1
            places = parents[depth - 1][row] if depth else [0]
            order.append([[] for _ in range(before)])
            sure.append([[] for _ in range(before)])
            for index, place in enumerate(places):
                order[depth][place] = list(range(index * siblings, (index + 1) * siblings))
                sure[depth][place] = confidences[depth][row][index]
        listed = [[token for one in of_depth[row] for token in one] for of_depth in tokens]
        found.append(RankedPaths(listed, order, sure))
    return found
