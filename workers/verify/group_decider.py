"""Decides tokens together with the other ranks of a tensor-parallel group.

Each rank computes logits for its own part of the vocabulary. The ranks exchange the best score and token of each part
in one collective, and every rank merges them. Before, for rows with top-k or top-p, they exchange sums of their tokens
by digit of their logits (`workers.sampling.parts`), whose size does not depend on the vocabulary. For log-probabilities
and rules that need the whole distribution, rank 0 gathers the logits of the rows, decides and broadcasts the tokens; on
CPUs also for rows with top-k, top-p or min-p, where it takes less time than the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import distributed

from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from workers.forward.loaded_model import LoadedModel
from workers.sampling.acceptance import Accepted
from workers.sampling.context import DecisionContext, is_truncated, rows_of_contexts
from workers.sampling.decide import is_shardable, merge_winners, shard_winners
from workers.sampling.parts import Parts
from workers.sampling.winners import DecisionKernels
from workers.transfer import HostCopies, rows_of
from workers.verify.decider import LaunchedDecisions, LocalDecider, chosen_contexts, most_probable

GATHERS_TRUNCATED = frozenset({"cpu"})
"""Types of devices on which rank 0 gathers the logits of truncated rows. The tokens are the same either way."""


class Exchange(Protocol):
    """What the ranks send each other to decide. All of them call each method together."""

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, `[ranks, …]`."""

    def gather(self, own: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' tensors on rank 0, `None` on other ranks."""

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Replace numbers on the host by those of rank 0."""


class _ProcessGroup:
    """Sends by the collectives of the process group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        gathered = own.new_empty((self._ranks, *own.shape))
        distributed.all_gather_into_tensor(gathered.flatten(0, 1), own)  # a list of tensors would be copied out of one
        return gathered

    def gather(self, own: torch.Tensor) -> list[torch.Tensor] | None:
        gathered = [torch.empty_like(own) for _ in range(self._ranks)] if self._rank == 0 else None
        distributed.gather(own, gathered, dst=0)
        return gathered

    def broadcast(self, numbers: torch.Tensor) -> None:
        distributed.broadcast(numbers, src=0)


class GroupDecider:
    """Decides with the other ranks. All of them get the same tokens."""

    def __init__(
        self,
        model: LoadedModel,
        rank: int,
        exchange: Exchange | None = None,
        kernels: DecisionKernels | None = None,
    ) -> None:
        """The ranks send by the process group unless `exchange` is given; `kernels` are as for `LocalDecider`."""
        self._model = model
        self._rank = rank
        self._shard = -(-model.vocabulary_size // model.tensor_parallel)
        self._exchange: Exchange = exchange or _ProcessGroup(rank, model.tensor_parallel)
        self._parts = Parts(rank, model.vocabulary_size, self._exchange.all_gather)
        self._kernels = kernels
        self._local = LocalDecider(kernels)

    def launch(
        self,
        logits: torch.Tensor,
        contexts: Sequence[DecisionContext],
        copies: HostCopies,
        with_distribution: bool = False,
    ) -> LaunchedDecisions:
        """Decide with all ranks. `logits` `[decisions, this rank's part of the vocabulary]`."""
        if not contexts:
            return LaunchedDecisions(list)
        if with_distribution:
            return self._on_first_rank(logits, contexts, copies, with_distribution=True)
        rows = rows_of_contexts(contexts)
        shardable = [self._is_shardable(row.sampling, logits) for row in rows for _ in range(len(row))]
        whole, part = ([index for index, found in enumerate(shardable) if found is kind] for kind in (False, True))
        by_part, on_first = (LaunchedDecisions(list) for _ in range(2))
        if part:
            by_part = self._by_winners(rows_of(logits, part), chosen_contexts(contexts, part), copies)
        if whole:
            on_first = self._on_first_rank(rows_of(logits, whole), chosen_contexts(contexts, whole), copies)

        def tokens() -> list[int]:
            found = dict(zip([*part, *whole], [*by_part.tokens(), *on_first.tokens()], strict=True))
            return [found[index] for index in range(len(contexts))]

        requested, on_device = (
            {index: of[position] for position, index in enumerate(whole) if position in of}
            for of in (on_first.logits, on_first.on_device)
        )
        return LaunchedDecisions(tokens, requested, on_device=on_device)

    def largest(self, logits: torch.Tensor) -> list[int] | None:  # noqa: ARG002 - part of the interface
        """No answer: the ranks compare their largest logits in `decide`."""
        return None

    def whole(self, logits: torch.Tensor) -> torch.Tensor | None:
        gathered = self._exchange.gather(self._padded(logits))
        return None if gathered is None else torch.cat(gathered, dim=1)[:, : self._model.vocabulary_size]

    def most_probable(self, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        """The most probable tokens; each rank sends the largest logits of its part."""
        count = min(count, self._model.vocabulary_size)
        own = most_probable(logits, min(count, logits.shape[1]))
        least = torch.finfo(logits.dtype).min  # above what fills the rows of a part with less than `count` tokens
        found = torch.stack(
            [logits.gather(1, own).clamp(min=least).double(), (own + self._model.vocabulary_offset).double()]
        )
        filled = torch.nn.functional.pad(found, (0, count - own.shape[1]), value=float("-inf"))
        gathered = self._exchange.gather(filled.contiguous())
        if gathered is None:
            return None
        values, tokens = torch.cat(gathered, dim=2)
        chosen: torch.Tensor = tokens.gather(1, values.topk(count).indices).long()
        return chosen

    def _is_shardable(self, sampling: SamplingParameters, logits: torch.Tensor) -> bool:
        """Whether the ranks decide without gathering the row's logits."""
        gathers = self._kernels is None and not logits.is_cuda and logits.device.type in GATHERS_TRUNCATED
        return is_shardable(sampling) and not (gathers and is_truncated(sampling))

    def _by_winners(
        self, logits: torch.Tensor, contexts: Sequence[DecisionContext], copies: HostCopies
    ) -> LaunchedDecisions:
        """Merge the best scores and tokens of all parts, on every rank."""
        values, ids = shard_winners(logits, contexts, self._model.vocabulary_offset, self._parts, self._kernels)
        found = torch.stack([values.double(), ids.double()])  # exact: a float32, and an integer below 2**53
        best, tokens = self._exchange.all_gather(found).unbind(1)  # [ranks, decisions]
        merged = copies.add(merge_winners(best, tokens.long()))
        return LaunchedDecisions(lambda: merged().tolist())

    def accept(self, walk: Callable[[], list[Accepted]], trees: Sequence[TokenTree]) -> list[Accepted]:
        """Walk the trees on rank 0, and send every rank what is accepted."""
        longest = max(map(len, trees), default=0)
        sent = torch.zeros((len(trees), 2 * longest + 2), dtype=torch.long)  # number of nodes, nodes, tokens
        if self._rank == 0:
            for index, one in enumerate(walk()):
                count = len(one.nodes)
                sent[index, : count + 1] = torch.tensor((count, *one.nodes))
                sent[index, longest + 1 : longest + 2 + count] = torch.tensor(one.tokens)
        self._exchange.broadcast(sent)
        return [
            Accepted(tuple(row[1 : row[0] + 1]), tuple(row[longest + 1 : longest + 2 + row[0]]))
            for row in sent.numpy().tolist()
        ]

    def _on_first_rank(
        self,
        logits: torch.Tensor,
        contexts: Sequence[DecisionContext],
        copies: HostCopies,
        *,
        with_distribution: bool = False,
    ) -> LaunchedDecisions:
        """Decide where the logits of the whole vocabulary are. Only rank 0 has what was requested besides tokens."""
        full = self.whole(logits)
        decided = LaunchedDecisions(lambda: [-1] * len(contexts))
        if full is not None:
            decided = self._local.launch(full, contexts, copies, with_distribution)

        def agreed() -> list[int]:
            tokens = torch.tensor(decided.tokens())  # on the host, which knows them
            self._exchange.broadcast(tokens)
            found: list[int] = tokens.numpy().tolist()
            return found

        return replace(decided, tokens=agreed)

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, shard]`, so that all ranks' parts are equally wide; the last rank's may be shorter."""
        missing = self._shard - logits.shape[1]
        if not missing:
            return logits.contiguous()
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")).contiguous()
