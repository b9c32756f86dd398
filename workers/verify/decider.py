"""Turns logits into tokens on a rank that has the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cluster.core.tree import TokenTree
from workers.forward.loaded_model import LoadedModel
from workers.sampling.acceptance import Accepted
from workers.sampling.context import DecisionContext, StepContexts, rows_of_contexts
from workers.sampling.decide import Undecidable, decide, largest
from workers.sampling.warp import log_distribution
from workers.sampling.winners import DecisionKernels
from workers.transfer import row_indices, rows_of
from workers.verify.sequence_state import ReadyRow


@dataclass(frozen=True, slots=True)
class Decisions:
    """One token per selected position, and the logits that this rank has to report log-probabilities from."""

    tokens: list[int]
    """-1 where all logits are NaN or −inf."""
    logits: dict[int, torch.Tensor]
    """Decision index → logits `[vocabulary]`, for the decisions whose log-probabilities were requested."""
    log_probabilities: torch.Tensor | None = None
    """float32 `[decisions, vocabulary]`, as `log_distribution` returns them; `None` unless requested, and on all ranks
    but the first."""


class Decider(Protocol):
    """Turns logits into tokens, on this rank alone or together with the other ranks."""

    def decide(
        self, logits: torch.Tensor, contexts: Sequence[DecisionContext], with_distribution: bool = False
    ) -> Decisions:
        """Decide one token per row of `logits` `[decisions, vocabulary (this rank's part)]`.

        Every rank returns the same tokens. With `with_distribution`, the decisions of the first rank have
        `log_probabilities`.
        """

    def accept(self, walk: Callable[[], list[Accepted]], trees: Sequence[TokenTree]) -> list[Accepted]:
        """Return what `walk` accepts of the trees, the same on all ranks: the first one calls it.

        It is for a walk that needs the `log_probabilities`.
        """

    def largest(self, logits: torch.Tensor) -> list[int] | None:
        """Decide where the largest logit of each row of `logits` decides, which is so where `leaders_of` is 1.

        `None` if `decide` must. All ranks return tokens, or none does.
        """

    def whole(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return `[rows, vocabulary]` from all ranks' parts of rows of logits; `None` on all ranks but the first."""

    def most_probable(self, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        """The tokens with the largest logits, best first, int64 `[rows, count or the size of a smaller vocabulary]`.

        `logits` is `[rows, vocabulary (this rank's part)]`; `None` on all ranks but the first. Which of equal logits
        comes first is not defined.
        """


class LocalDecider:
    """Decides on a rank whose logits cover the whole vocabulary."""

    def __init__(self, kernels: DecisionKernels | None = None) -> None:
        """`kernels` decide in place of those of the logits' device."""
        self._kernels = kernels

    def largest(self, logits: torch.Tensor) -> list[int] | None:
        return largest(logits)

    def accept(self, walk: Callable[[], list[Accepted]], trees: Sequence[TokenTree]) -> list[Accepted]:  # noqa: ARG002
        return walk()

    def whole(self, logits: torch.Tensor) -> torch.Tensor | None:
        return logits

    def most_probable(self, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        return most_probable(logits, min(count, logits.shape[1]))

    def decide(
        self, logits: torch.Tensor, contexts: Sequence[DecisionContext], with_distribution: bool = False
    ) -> Decisions:
        def choose(rows: list[int]) -> list[int]:
            return decide(rows_of(logits, rows), chosen_contexts(contexts, rows), self._kernels)

        tokens = decide_where_possible(len(contexts), choose)
        requested = {index: logits[index] for index in _with_logprobs(contexts)}
        return Decisions(tokens, requested, log_distribution(logits, list(contexts)) if with_distribution else None)


class RenormalizingDecider:
    """Decides as another decider does, and reports log-probabilities among the tokens that can be chosen.

    `transformers` does the same where a generation configuration says `renormalize_logits`: the scores of beams then
    leave out tokens that are excluded. A chosen token does not depend on it.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def largest(self, logits: torch.Tensor) -> list[int] | None:
        return self._decider.largest(logits)

    def accept(self, walk: Callable[[], list[Accepted]], trees: Sequence[TokenTree]) -> list[Accepted]:
        return self._decider.accept(walk, trees)

    def whole(self, logits: torch.Tensor) -> torch.Tensor | None:
        return self._decider.whole(logits)

    def most_probable(self, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        return self._decider.most_probable(logits, count)

    def decide(
        self, logits: torch.Tensor, contexts: Sequence[DecisionContext], with_distribution: bool = False
    ) -> Decisions:
        found = self._decider.decide(logits, contexts, with_distribution)
        masked = {index: _without(row, contexts[index].excluded_tokens) for index, row in found.logits.items()}
        return replace(found, logits=masked)


def decider_of_model(model: LoadedModel, decider: Decider) -> Decider:
    """The decider, or one that renormalizes log-probabilities where the model's generation configuration says so."""
    renormalizes = model.source is not None and model.source.defaults.renormalize_logits
    return RenormalizingDecider(decider) if renormalizes else decider


def _without(logits: torch.Tensor, excluded: Sequence[int]) -> torch.Tensor:
    """A row of logits `[vocabulary]` in which the excluded tokens are −inf."""
    if not excluded:
        return logits
    masked = logits.clone()
    masked[row_indices(excluded, masked)] = -math.inf
    return masked


def decide_rows(
    decider: Decider, ready: Sequence[ReadyRow], logits: torch.Tensor, leaders: int, with_distribution: bool
) -> Decisions:
    """Decide at the root and at every node of each row, from logits `[decisions, vocabulary (this rank's part)]`.

    `leaders` is what `common_leaders` returned for the rows. Where it is 1, the largest logit decides, and nothing else
    is looked at.
    """
    if leaders == 1 and (tokens := decider.largest(logits)) is not None:
        return Decisions(tokens, {})
    return decider.decide(logits, StepContexts([row.decisions() for row in ready if row.row.decide]), with_distribution)


def chosen_contexts(contexts: Sequence[DecisionContext], rows: Sequence[int]) -> Sequence[DecisionContext]:
    """These contexts, given by ascending numbers, each once; the contexts themselves if they are all of them."""
    return contexts if len(rows) == len(contexts) else [contexts[row] for row in rows]


def _with_logprobs(contexts: Sequence[DecisionContext]) -> Iterator[int]:
    """The numbers of the contexts whose requests want log-probabilities."""
    end = 0
    for row in rows_of_contexts(contexts):
        first, end = end, end + len(row)
        if row.sampling.logprobs is not None:
            yield from range(first, end)


def decide_where_possible(count: int, choose: Callable[[list[int]], list[int]]) -> list[int]:
    """Call `choose` for rows `0 … count - 1` and return their tokens, with -1 for rows that are undecidable.

    When `choose` raises `Undecidable`, it is called once more without the rows that the error names.
    """
    rows = list(range(count))
    try:
        return choose(rows)
    except Undecidable as error:
        tokens = [-1] * count
        decidable = [row for row in rows if row not in error.rows]
        for row, token in zip(decidable, choose(decidable), strict=True):
            tokens[row] = token
        return tokens


_BLOCK = 64
"""Tokens whose largest logit is found first. The best tokens are in the blocks with the largest ones."""


def most_probable(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens with the `count` largest logits `[rows, vocabulary]`, best first: indices `[rows, count]`.

    `count` is at most the size of the vocabulary. Which of equal logits comes first is not defined.
    """
    rows, size = logits.shape
    blocks = size // _BLOCK
    if logits.device.type != "cpu" or blocks <= count:
        return logits.topk(count).indices
    whole = logits[:, : blocks * _BLOCK].reshape(rows, blocks, _BLOCK)
    best = whole.amax(-1).topk(count, sorted=False).indices  # [rows, count]
    offsets = torch.arange(_BLOCK, device=logits.device)
    tokens = (best.unsqueeze(-1) * _BLOCK + offsets).flatten(1)
    found = whole.gather(1, best.unsqueeze(-1).expand(-1, -1, _BLOCK)).flatten(1)
    if size > blocks * _BLOCK:  # the tokens after the last whole block
        rest = torch.arange(blocks * _BLOCK, size, device=logits.device)
        tokens = torch.cat([tokens, rest.expand(rows, -1)], dim=1)
        found = torch.cat([found, logits[:, blocks * _BLOCK :]], dim=1)
    chosen: torch.Tensor = tokens.gather(1, found.topk(count).indices)
    return chosen
