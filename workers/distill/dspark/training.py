"""Trains a DSpark drafter on blocks of texts. Batches are drawn on the device and have one shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.device_training import DevicePlan, DeviceTraining, Measured
from workers.distill.dspark.loss import SlotGoals, head_loss
from workers.distill.dspark.measure import Ranker, measure
from workers.distill.dspark.module import FIRST, SECOND, SparkModule
from workers.distill.dspark.rows import Goal, TextRows
from workers.distill.peers import ALONE, Peers
from workers.model.drafting.ends import rows_of_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan(DevicePlan):
    """Settings of a training on blocks."""

    learning_rate: float = 1.5e-3
    warm_up: float = 0.02
    rows: int = 12
    """Rows of a batch, of all processes together."""
    blocks: int = 224
    """Blocks of a row."""
    overlap: float = 1.0
    """Weight of the share that draft and target have in common, relative to the cross entropy."""
    trees: tuple[int, ...] = (7, 16, 32)
    """Nodes of the trees that are measured."""


class Anchors(NamedTuple):
    """The anchors of a batch of blocks."""

    rows: Tensor
    """[rows] Rows of text."""
    places: Tensor
    """[rows, blocks] The position of each anchor in its row."""
    is_drawn: Tensor
    """[rows, blocks] Whether there is such an anchor: a row may have fewer."""


class BlockTraining(DeviceTraining[SparkModule, TextRows, Anchors]):
    """Trains one drafter for a target."""

    _plan: BlockPlan

    def __init__(
        self,
        head: Tensor,
        module: SparkModule,
        plan: BlockPlan,
        peers: Peers = ALONE,
        vocabulary: Tensor | None = None,
    ) -> None:
        """`head` [draft vocabulary, hidden size] are the rows of the tokens that the drafter can propose.

        `vocabulary` [draft vocabulary] int64 are these tokens, ascending; `None`: all. The other parameters are those
        of `DeviceTraining`.
        """
        super().__init__(head, module, plan, peers)
        self._vocabulary = vocabulary
        self._row_of = rows_of_tokens(vocabulary, len(module.get_parameter(FIRST))).to(head.device)

    def measure(self, texts: TextRows) -> Measured:
        """Measure on texts of greedy answers, in chains and in trees."""
        self._module.eval()
        with self._autocast():
            plan, blocks = self._plan, max(1, self._plan.blocks // 2)
            ranker = Ranker(self._module, self._head, self._vocabulary)
            found = measure(ranker, texts, plan.trees, rows=plan.rows, blocks=blocks)
        self._module.train()
        return found

    def _batches(self, texts: TextRows) -> Iterator[tuple[int, Anchors]]:
        generator = torch.Generator(texts.device).manual_seed(self._plan.seed)
        parts, peers = self._checked_parts(), self._peers
        count = min(self._plan.rows, texts.rows) // parts
        if not count:
            raise ConfigurationError(f"parts: {parts} is refused; it must be at most {texts.rows}, the rows of texts")
        own = slice(peers.rank * count, (peers.rank + 1) * count) if peers.count > 1 else slice(None)
        epoch = 0
        while True:
            orders = []
            for part in range(parts):
                size = -(-(texts.rows - part) // parts)
                orders.append(torch.randperm(size, generator=generator, device=texts.device) * parts + part)
            for first in range(0, texts.rows // parts - count + 1, count):
                rows = torch.cat([order[first : first + count] for order in orders])
                places, is_drawn = texts.drawn(rows, self._plan.blocks, generator)
                yield epoch, Anchors(rows[own], places[own], is_drawn[own])
            epoch += 1

    def _losses(self, texts: TextRows, batch: Anchors) -> tuple[Tensor, Tensor]:
        plan, module = self._plan, self._module
        slots = module.shape.slots
        blocks, goal = texts.blocks(batch.rows, batch.places, slots)
        depths = torch.arange(slots, device=texts.device)
        weights = (goal.is_text & batch.is_drawn.unsqueeze(2)) * plan.decay**depths
        weights = weights if goal.weights is None else weights * goal.weights
        weights = (weights / self._peers.summed(weights.sum()).clamp(min=1e-9)).flatten()
        with self._autocast():
            hidden = module(texts.taps(batch.rows), blocks, recomputes=plan.recomputes)
            mixed, embedded = module.mixed(hidden, blocks.tokens)
            goals = SlotGoals(*self._wanted(goal), weights, plan.overlap)
            vectors = torch.cat([hidden, mixed.to(hidden.dtype)], dim=-1).flatten(0, 2)
            found = head_loss(vectors, self._head, module.get_parameter(SECOND), goals)
            sure = module.sureness(hidden.detach(), embedded.detach()).flatten().float()
        # Where the target's most probable token cannot be proposed, its share is 0.
        is_right = found.is_right & (goals.shares[:, 0] > 0)
        doubt = torch.nn.functional.binary_cross_entropy_with_logits(sure, is_right.float(), weights, reduction="sum")
        return found.loss + doubt, torch.stack([found.loss, (is_right * weights).sum()])

    def _wanted(self, goal: Goal) -> tuple[Tensor, Tensor]:
        """The rows of the head [slots, leading] of the target's most probable tokens, and their probabilities.

        A token without a row has row 0 and probability 0.
        """
        rows, shares = self._row_of[goal.tokens.flatten(0, 2)], goal.probabilities.flatten(0, 2)
        return rows.clamp(min=0), shares * (rows >= 0)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """In bfloat16, Muon for inner matrices; else AdamW.

        AdamW also has vectors and matrices with a row for each token. Muon multiplies in bfloat16, for which many CPUs
        have no instructions.
        """
        plan, is_gpu = self._plan, self._device.type != "cpu"
        named = dict(self._module.named_parameters())
        inner = [
            value
            for name, value in named.items()
            if plan.is_bfloat16 and value.dim() == 2 and len(value) > 1 and name not in (FIRST, SECOND)
        ]
        known = set(map(id, inner))
        others = [value for value in named.values() if id(value) not in known]
        adam = torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=is_gpu)
        return (self._muon(inner), adam) if inner else (adam,)
