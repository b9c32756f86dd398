"""A training by roll-outs on texts that were just served: of the target, tokens, taps and probabilities are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.distill.answers import Answer
from workers.distill.eagle3.head import LM_HEAD, Eagle3Head
from workers.distill.eagle3.states import TextBatch, TextStates
from workers.distill.eagle3.training import RollOutPlan, RollOutTraining
from workers.model.drafting.ends import TargetEnds
from workers.model.public_shapes import FeatureShape


@dataclass(frozen=True, slots=True)
class _Ends:
    """Stands for a decoder-only model of `transformers` in a training that asks it for nothing but its embedding."""

    embedding: nn.Embedding

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.embedding


class ServedTraining(RollOutTraining):
    """Trains a head on texts with the target's most probable tokens. Its output matrix stays."""

    def __init__(self, ends: TargetEnds, head: Eagle3Head, plan: RollOutPlan) -> None:
        vocabulary = torch.arange(len(ends.head)) if ends.vocabulary is None else ends.vocabulary
        rows, size = ends.embedding.shape
        embedding = nn.Embedding(rows, size, _weight=ends.embedding, _freeze=True)
        super().__init__(_Ends(embedding), head, vocabulary, plan)
        self._row_of = ends.row_of

    def _wanted(self, batch: TextBatch, places: Tensor) -> Tensor:
        if batch.successors is None:
            raise ValueError("texts: needed the target's most probable tokens")
        leading, shares = (part[:, 1:-1].flatten(0, 1)[places] for part in batch.successors)
        rows = self._row_of[leading]
        found = torch.zeros((len(rows), len(self._vocabulary)))
        return found.scatter_add_(1, rows.clamp(min=0), shares * (rows >= 0))


def train_served(
    shape: FeatureShape,
    parameters: Mapping[str, Tensor],
    ends: TargetEnds,
    texts: tuple[Sequence[Answer], Sequence[Answer]],
    states: Callable[[Answer], Tensor],
    plan: RollOutPlan,
) -> dict[str, Tensor]:
    """The parameters of a head after a training on the CPU that begins with `parameters`.

    `texts` are those to train and to measure on; `states` gives the taps [tokens, taps x hidden size] of each. With
    texts to measure on, the state that drafts these best is kept, and the plan must name `steps` and `report_steps`.
    """
    head = Eagle3Head(shape, 1)
    head.lm_head.weight = nn.Parameter(ends.head, requires_grad=False)
    head.load_state_dict(dict(parameters) | {LM_HEAD: ends.head})
    training = ServedTraining(ends, head, plan)
    trained, *measured = (TextStates.shown(part, states) for part in texts if part)
    if measured:
        training.run_to_best(trained, *measured)
    else:
        training.run(trained, lambda _: None, float("inf"))
    return {name: value.detach() for name, value in head.state_dict().items() if name != LM_HEAD}
