"""Decides tokens together with the other ranks of a tensor-parallel group.

Each rank computes logits for its own part of the vocabulary. For most sampling parameters the ranks exchange only the
best score and token of each part. For parameters that need the whole distribution, rank 0 gathers the logits of the
rows. Rank 0 then broadcasts the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from workers.forward.loaded_model import LoadedModel
from workers.sampling.context import DecisionContext
from workers.sampling.decide import is_shardable, merge_winners, shard_winners
from workers.verify.decider import Decisions, LocalDecider, decide_where_possible


class GroupDecider:
    """Decides with the other ranks: rank 0 merges what the ranks found and broadcasts the tokens."""

    def __init__(self, model: LoadedModel, rank: int) -> None:
        self._model = model
        self._rank = rank
        self._ranks = model.tensor_parallel
        self._shard = -(-model.vocabulary_size // self._ranks)
        self._local = LocalDecider()

    def decide(
        self, logits: torch.Tensor, contexts: Sequence[DecisionContext], with_distribution: bool = False
    ) -> Decisions:
        """See `Decider`. `logits` `[decisions, this rank's part of the vocabulary]`."""
        if with_distribution:
            raise ValueError("no rank of a tensor-parallel group has the whole distribution")
        if not contexts:
            return Decisions([], {})
        whole = [index for index, context in enumerate(contexts) if not is_shardable(context.sampling)]
        part = [index for index in range(len(contexts)) if index not in set(whole)]
        tokens = [-1] * len(contexts)
        requested: dict[int, torch.Tensor] = {}
        if part:
            chosen = self._by_winners(logits[part], [contexts[index] for index in part])
            for index, token in zip(part, chosen, strict=True):
                tokens[index] = token
        if whole:
            full = self.whole(logits[whole])
            if full is not None:
                decided = self._local.decide(full, [contexts[index] for index in whole])
                for position, index in enumerate(whole):
                    tokens[index] = decided.tokens[position]
                    if position in decided.logits:
                        requested[index] = decided.logits[position]
        agreed = torch.tensor(tokens, device=self._model.device)
        distributed.broadcast(agreed, src=0)
        return Decisions(agreed.tolist(), requested)

    def whole(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `Decider`."""
        gathered = self._gather(self._padded(logits))
        return None if gathered is None else torch.cat(gathered, dim=1)[:, : self._model.vocabulary_size]

    def _by_winners(self, logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> list[int]:
        """The tokens on rank 0, -1 everywhere on other ranks."""
        values, ids = shard_winners(logits, contexts, self._model.vocabulary_offset)
        gathered_values, gathered_ids = self._gather(values), self._gather(ids)
        if gathered_values is None or gathered_ids is None:
            return [-1] * len(contexts)
        best, tokens = torch.stack(gathered_values), torch.stack(gathered_ids)
        return decide_where_possible(len(contexts), lambda rows: merge_winners(best[:, rows], tokens[:, rows]))

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, shard]`, so that all ranks' parts are equally wide; the last rank's may be shorter."""
        missing = self._shard - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")).contiguous()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' tensors on rank 0, `None` on other ranks."""
        gathered = [torch.empty_like(tensor) for _ in range(self._ranks)] if self._rank == 0 else None
        distributed.gather(tensor.contiguous(), gathered, dst=0)
        return gathered
