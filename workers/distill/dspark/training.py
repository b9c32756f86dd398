"""Trains a DSpark drafter on blocks of texts whose hidden states are on the device.

No step waits for the device: batches are drawn there, have one shape, and losses are read when they are reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.distill.dspark.loss import SlotGoals, head_loss
from workers.distill.dspark.measure import Measured, measure
from workers.distill.dspark.module import FIRST, SECOND, SparkModule
from workers.distill.dspark.rows import TextRows
from workers.distill.learning_rate import learning_rate


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Settings of a training. It ends after `steps`, or after `seconds` where `steps` is `None`."""

    seconds: float = 0.0
    steps: int | None = None
    rows: int = 12
    """Rows of a batch."""
    blocks: int = 224
    """Blocks of a row."""
    decay: float = 0.8
    """Weight of a slot relative to the slot before."""
    overlap: float = 1.0
    """Weight of the share that draft and target have in common, relative to the cross entropy."""
    learning_rate: float = 1.5e-3
    warm_up: float = 0.02
    """Share of the training in which the learning rate rises."""
    weight_decay: float = 0.01
    gradient_norm: float = 1.0
    is_bfloat16: bool = True
    """Whether matrices are multiplied in bfloat16. Parameters are float32."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """The state of a training."""

    step: int
    seconds: float
    loss: float
    """The mean loss since the last state."""
    right: float
    """The mean share of slots since the last state whose most probable token is the target's."""
    epoch: int

    def __str__(self) -> str:
        pace = self.step / max(1e-9, self.seconds)
        return (
            f"{self.seconds:.0f} s: epoch {self.epoch}, step {self.step} ({pace:.1f} a second), loss {self.loss:.4f}, "
            f"right {self.right:.1%}"
        )


class BlockTraining:
    """Trains one drafter for a target."""

    def __init__(self, target: Any, module: SparkModule, plan: BlockPlan) -> None:
        self._module, self._plan = module, plan
        self._head = target.get_output_embeddings().weight.detach()

    def run(
        self,
        texts: TextRows,
        report: Callable[[State], None],
        report_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> State:
        """Train. `report` is called each `report_seconds`, and at the end.

        Raises `FloatingPointError` if the loss is not finite.
        """
        plan, module = self._plan, self._module
        optimizers = self._optimizers()
        generator = torch.Generator(texts.device).manual_seed(plan.seed)
        began = reported = clock()
        found: list[Tensor] = []
        state = State(0, 0.0, math.nan, math.nan, 0)
        step = 0
        module.train()
        for epoch, rows in _batches(texts, plan, generator):
            seconds = clock() - began
            done = step / plan.steps if plan.steps is not None else seconds / max(1e-9, plan.seconds)
            if done >= 1:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(plan.learning_rate, plan.warm_up, done)
            found.append(self._step(texts, rows, generator, optimizers))
            step += 1
            if clock() - reported >= report_seconds:
                state = _state(step, clock() - began, found, epoch)
                report(state)
                reported = clock()
                found.clear()
        if found:
            state = _state(step, clock() - began, found, epoch)
            report(state)
        return state

    def measure(self, texts: TextRows, sizes: Sequence[int]) -> Measured:
        """Measure on texts of greedy answers, with trees of so many nodes."""
        self._module.eval()
        with self._autocast():
            found = measure(self._module, self._head, texts, sizes, rows=self._plan.rows, blocks=self._plan.blocks // 2)
        self._module.train()
        return found

    def _step(
        self, texts: TextRows, rows: Tensor, generator: torch.Generator, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Tensor:
        """Take one step. Returns the loss and the share of right slots, [2]."""
        plan, module = self._plan, self._module
        slots = module.shape.slots
        anchors, is_drawn = texts.drawn(rows, plan.blocks, generator)
        blocks, goal = texts.blocks(rows, anchors, slots)
        depths = torch.arange(slots, device=texts.device)
        weights = (goal.is_text & is_drawn.unsqueeze(2)) * plan.decay**depths
        weights = (weights / weights.sum().clamp(min=1e-9)).flatten()
        with self._autocast():
            hidden = module(texts.taps(rows), blocks)
            mixed, embedded = module.mixed(hidden, blocks.tokens)
            goals = SlotGoals(goal.tokens.flatten(0, 2), goal.probabilities.flatten(0, 2), weights, plan.overlap)
            vectors = torch.cat([hidden, mixed.to(hidden.dtype)], dim=-1).flatten(0, 2)
            found = head_loss(vectors, self._head, module.get_parameter(SECOND), goals)
            sure = module.sureness(hidden.detach(), embedded.detach()).flatten().float()
        doubt = torch.nn.functional.binary_cross_entropy_with_logits(
            sure, found.is_right.float(), weights, reduction="sum"
        )
        torch.autograd.backward(found.loss + doubt)
        torch.nn.utils.clip_grad_norm_(module.parameters(), plan.gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return torch.stack([found.loss.detach(), (found.is_right * weights).sum()])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._head.device.type, torch.bfloat16, enabled=self._plan.is_bfloat16)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """On a GPU, Muon (Jordan et al. 2024) for inner matrices; else AdamW.

        AdamW also has vectors and matrices with a row for each token. Muon multiplies in bfloat16, for which many CPUs
        have no instructions.
        """
        plan, is_cuda = self._plan, self._head.device.type == "cuda"
        named = dict(self._module.named_parameters())
        inner = [
            value
            for name, value in named.items()
            if is_cuda and value.dim() == 2 and len(value) > 1 and name not in (FIRST, SECOND)
        ]
        known = set(map(id, inner))
        others = [value for value in named.values() if id(value) not in known]
        adam = torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=is_cuda)
        if not inner:
            return (adam,)
        muon = torch.optim.Muon(
            inner, lr=plan.learning_rate, weight_decay=plan.weight_decay, ns_steps=4, adjust_lr_fn="match_rms_adamw"
        )
        return muon, adam


def _batches(texts: TextRows, plan: BlockPlan, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """Epochs and the rows of each batch, without end. All batches have the same number of rows."""
    count = min(plan.rows, texts.rows)
    epoch = 0
    while True:
        order = torch.randperm(texts.rows, generator=generator, device=texts.device)
        yield from ((epoch, order[first : first + count]) for first in range(0, texts.rows - count + 1, count))
        epoch += 1


def _state(step: int, seconds: float, found: Sequence[Tensor], epoch: int) -> State:
    loss, right = torch.stack(list(found)).mean(dim=0).tolist()
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss before step {step} is {loss}")
    return State(step, seconds, loss, right, epoch)
