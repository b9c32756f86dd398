"""Measures a DSpark drafter on texts as it is served: greedy chains, and trees of the most probable paths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.distill.device_training import Measured
from workers.distill.dspark.module import SECOND, SparkModule
from workers.distill.dspark.rows import TextRows

_PARENTS, _SIBLINGS = 4, 8
"""Candidates of a depth that others follow, and candidates below one: what a served drafter ranks by default."""
_LEAST = 1e-6


class Ranker:
    """Ranks the candidates of a drafter as it does when it is served."""

    def __init__(self, module: SparkModule, head: Tensor, vocabulary: Tensor | None) -> None:
        """`head` [draft vocabulary, hidden size] has the rows of `vocabulary`, or of all tokens."""
        self.module, self._head, self._vocabulary = module, head, vocabulary

    def ranked(self, hidden: Tensor, text: Tensor, *, parents: int, siblings: int) -> tuple[Tensor, Tensor]:
        """The logarithms of the paths of all candidates [blocks, candidates], and which paths the text has.

        `hidden` are [blocks, slots, hidden size], `text` [blocks, 1 + slots] the anchors and the tokens after them.
        """
        last, following = text[:, 0], text[:, 1:]
        module, head, markov = self.module, self._head, self.module.markov_head
        second = module.get_parameter(SECOND).to(head.dtype)
        previous, state = last.unsqueeze(1), hidden.new_zeros(len(hidden), 1, module.rank)
        paths, right = hidden.new_zeros(len(hidden), 1), torch.ones_like(last, dtype=torch.bool).unsqueeze(1)
        all_scores, all_right = [], []
        for slot in range(hidden.shape[1]):
            embedded = markov.markov_w1(previous)
            own = hidden[:, slot : slot + 1].expand(-1, previous.shape[1], -1)
            mixed, state = markov.step(embedded, own, state)
            base = (hidden[:, slot].to(head.dtype) @ head.T).float().unsqueeze(1)
            logits = base + (mixed.to(head.dtype) @ second.T).float()
            found, rows = logits.topk(min(siblings, logits.shape[-1]), dim=-1)
            tokens = rows if self._vocabulary is None else self._vocabulary[rows]
            shares = (found - logits.logsumexp(dim=-1, keepdim=True)).exp()
            sure = module.sureness(own, embedded).sigmoid().clamp(_LEAST, 1.0 - _LEAST).unsqueeze(-1)
            others = shares[..., 1:] * ((1.0 - sure) / (1.0 - shares[..., :1]).clamp(min=_LEAST))
            shares = torch.cat([sure, others.clamp(_LEAST**4, 1.0)], dim=-1)
            scores = (paths.unsqueeze(2) + shares.log()).flatten(1)
            is_right = (right.unsqueeze(2) & (tokens == following[:, slot, None, None])).flatten(1)
            all_scores.append(scores)
            all_right.append(is_right)
            paths, chosen = scores.topk(min(parents, scores.shape[1]))
            right, previous = is_right.gather(1, chosen), tokens.flatten(1).gather(1, chosen)
            origins = (chosen // tokens.shape[2]).unsqueeze(2).expand(-1, -1, state.shape[2])
            state = state.gather(1, origins)
        return torch.cat(all_scores, dim=1), torch.cat(all_right, dim=1)


@torch.no_grad()
def measure(ranker: Ranker, texts: TextRows, sizes: Sequence[int], *, rows: int, blocks: int) -> Measured:
    """Measure on texts of greedy answers, so many rows and blocks of a row at once.

    `sizes` are numbers of nodes of trees; none: chains alone are measured. Each step begins after the one before;
    shares of right tokens are those of all anchors.
    """
    module = ranker.module
    slots = module.shape.slots
    places: list[tuple[int, int]] = []
    accepted, known = list[Tensor](), list[Tensor]()
    for first in range(0, texts.rows, rows):
        some = torch.arange(first, min(first + rows, texts.rows), device=texts.device)
        taps = texts.taps(some)
        of_row = texts.all_anchors(some)
        for begin in range(0, max(map(len, of_row)), blocks):
            parts = [one[begin : begin + blocks] for one in of_row]
            padded = [[*part, *[0] * (blocks - len(part))] for part in parts]
            is_one = torch.tensor([[index < len(part) for index in range(blocks)] for part in parts])
            chosen = is_one.flatten().nonzero().flatten().to(texts.device)
            block, goal = texts.blocks(some, torch.tensor(padded, device=texts.device), slots)
            hidden = module(taps, block).flatten(0, 1)[chosen]
            is_text = goal.is_text.flatten(0, 1)[chosen]
            following = goal.following.flatten(0, 1)[chosen].masked_fill(~is_text, -1)
            tokens = torch.cat([block.tokens[:, :, :1].flatten(0, 1)[chosen], following], dim=1)
            _, chain = ranker.ranked(hidden, tokens, parents=1, siblings=1)
            found = [chain.sum(dim=1)]
            if sizes:
                scores, right = ranker.ranked(hidden, tokens, parents=_PARENTS, siblings=_SIBLINGS)
            for size in sizes:
                picked = scores.topk(min(size, scores.shape[1])).indices
                found.append(right.gather(1, picked).sum(dim=1))
            accepted.append(torch.stack(found, dim=1).cpu())
            known.append(is_text.sum(dim=1).cpu())
            places += [(first + row, place) for row, part in enumerate(parts) for place in part]
    return _summed(torch.cat(accepted), torch.cat(known), places, sizes, slots)


def _summed(
    accepted: Tensor, known: Tensor, places: Sequence[tuple[int, int]], sizes: Sequence[int], slots: int
) -> Measured:
    """The figures from what is accepted [anchors, 1 + sizes], and the tokens [anchors] that could be."""
    chain = accepted[:, 0]
    right = [int((chain > depth).sum()) for depth in range(slots)]
    tried = [int(((chain >= depth) & (known > depth)).sum()) for depth in range(slots)]
    found = accepted.tolist()
    index = {place: number for number, place in enumerate(places)}
    rates = []
    for column in range(1 + len(sizes)):
        steps = tokens = 0
        for row, place in places:
            if (row, place - 1) in index:
                continue
            while (row, place) in index:
                steps += 1
                taken = found[index[row, place]][column] + 1
                tokens, place = tokens + taken, place + taken
        rates.append(tokens / max(1, steps))
    return Measured(
        tuple(one / max(1, all_) for one, all_ in zip(right, tried, strict=True)),
        rates[0],
        dict(zip(sizes, rates[1:], strict=True)),
    )
