"""Turns logits into tokens on a rank that has the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from cluster.core.tree import TokenTree
from workers.forward.loaded_model import LoadedModel
from workers.sampling.acceptance import Accepted
from workers.sampling.context import DecisionContext, StepContexts, rows_of_contexts
from workers.sampling.decide import largest, launch
from workers.sampling.warp import log_distribution
from workers.sampling.winners import DecisionKernels
from workers.transfer import HostCopies, row_indices
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


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedDecisions:
    """Decisions that a device may still compute. All but the tokens is what `Decisions` says."""

    tokens: Callable[[], list[int]]
    """Returns the tokens. The host may wait for the device. All ranks call this at the same place."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    log_probabilities: torch.Tensor | None = None
    on_device: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The tokens of the decisions in `logits`, int64 `[]` each; empty unless they are on a GPU."""

    def read(self) -> Decisions:
        """The decisions, once the device has computed them."""
        return Decisions(self.tokens(), self.logits, self.log_probabilities)


class Decider(Protocol):
    """Turns logits into tokens, on this rank alone or together with the other ranks."""

    def launch(
        self,
        logits: torch.Tensor,
        contexts: Sequence[DecisionContext],
        copies: HostCopies,
        with_distribution: bool = False,
    ) -> LaunchedDecisions:
        """Decide one token per row of `logits` `[decisions, vocabulary (this rank's part)]`.

        Every rank reads the same tokens, which are copied to the host with all other `copies`. With
        `with_distribution`, the decisions of the first rank have `log_probabilities`.
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

    def launch(
        self,
        logits: torch.Tensor,
        contexts: Sequence[DecisionContext],
        copies: HostCopies,
        with_distribution: bool = False,
    ) -> LaunchedDecisions:
        chosen = launch(logits, contexts, copies, self._kernels)
        requested = list(_with_logprobs(contexts))
        return LaunchedDecisions(
            chosen.read,
            {index: logits[index] for index in requested},
            log_distribution(logits, list(contexts)) if with_distribution else None,
            {} if chosen.on_device is None else {index: chosen.on_device[index] for index in requested},
        )


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

    def launch(
        self,
        logits: torch.Tensor,
        contexts: Sequence[DecisionContext],
        copies: HostCopies,
        with_distribution: bool = False,
    ) -> LaunchedDecisions:
        found = self._decider.launch(logits, contexts, copies, with_distribution)
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


def launch_rows(
    decider: Decider,
    ready: Sequence[ReadyRow],
    logits: torch.Tensor,
    leaders: int,
    copies: HostCopies,
    with_distribution: bool,
) -> LaunchedDecisions:
    """Decide at the root and at every node of each row, from logits `[decisions, vocabulary (this rank's part)]`.

    `leaders` is what `common_leaders` returned for the rows. Where it is 1, the largest logit decides, and nothing else
    is looked at.
    """
    if leaders == 1 and (tokens := decider.largest(logits)) is not None:
        return LaunchedDecisions(lambda: tokens)
    contexts = StepContexts([row.decisions() for row in ready if row.row.decide])
    return decider.launch(logits, contexts, copies, with_distribution)


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
