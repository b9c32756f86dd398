"""Trains an EAGLE-3 head by its own roll-outs over texts whose hidden states are on the device."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.eagle3.head import LM_HEAD, Eagle3Head
from workers.distill.eagle3.rollout import roll_out
from workers.distill.eagle3.states import TextBatch, TextStates, target_probabilities
from workers.distill.learning_rate import learning_rate

_MULTIPLE = 64
"""Batches on a GPU have lengths that are multiples of this: few shapes, and none that a kernel copies to align it."""
_NEIGHBOURS = 32
"""Shuffled texts are sorted by length within this many batches. This saves padding and keeps the order random."""


@dataclass(frozen=True, slots=True)
class RollOutPlan:
    """Settings of a training. It ends after `steps`, or after `seconds` where `steps` is `None`."""

    seconds: float = 0.0
    steps: int | None = None
    depths: int = 5
    """Steps of a roll-out."""
    decay: float = 0.8
    """Weight of a depth relative to the depth before."""
    learning_rate: float = 1e-3
    warm_up: float = 0.03
    """Share of the training in which the learning rate rises."""
    weight_decay: float = 0.01
    gradient_norm: float = 1.0
    batch_tokens: int = 16384
    """Tokens of a batch, padding included."""
    is_bfloat16: bool = True
    """Whether matrices are multiplied in bfloat16. Parameters are float32."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """How well a head drafts texts that it was not trained on."""

    slots: tuple[float, ...]
    """For each depth, the share of tokens that are right after right ones."""
    tokens_per_step: float
    """The tokens that one step of the target adds with a greedy chain of all depths."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a training."""

    step: int
    seconds: float
    loss: float
    """The mean loss since the last state."""
    epoch: int


Report = Callable[[State], None]


class RollOutTraining:
    """Trains one head for a target."""

    def __init__(self, target: Any, head: Eagle3Head, vocabulary: Tensor, plan: RollOutPlan) -> None:
        """`vocabulary` [draft vocabulary] are the tokens of the rows of the head, ascending."""
        self._target, self._head, self._plan = target, head, plan
        self._vocabulary = vocabulary
        self._embedding = target.get_input_embeddings().weight

    def run(
        self, texts: TextStates, report: Report, report_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> State:
        """Train. `report` is called each `report_seconds`, and at the end.

        Raises `ConfigurationError` without a text to learn from, and `FloatingPointError` if the loss is not finite.
        """
        plan, head = self._plan, self._head
        optimizers = self._optimizers()
        began = reported = clock()
        state, losses = State(0, 0.0, math.nan, 0), list[Tensor]()
        step, multiple = 0, _MULTIPLE if self._embedding.is_cuda else 1
        head.train()
        for epoch, rows in self._batches(texts):
            seconds = clock() - began
            done = step / plan.steps if plan.steps is not None else seconds / max(1e-9, plan.seconds)
            if done >= 1:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(plan.learning_rate, plan.warm_up, done)
            losses.append(self._step(texts.batch(rows, multiple), optimizers))
            step += 1
            if clock() - reported >= report_seconds:
                reported = clock()
                state = _state(step, reported - began, losses, epoch)
                report(state)
                losses.clear()
        if losses:
            state = _state(step, clock() - began, losses, epoch)
            report(state)
        return state

    @torch.no_grad()
    def measure(self, texts: TextStates) -> Measured:
        """Measure on texts of greedy answers."""
        plan, head = self._plan, self._head
        head.eval()
        right, known = torch.zeros(plan.depths), torch.zeros(plan.depths)
        paths = accepted = 0.0
        for rows in _grouped(texts.learnable, texts.lengths, plan.batch_tokens):
            batch = texts.batch(rows)
            starts = self._drafted(batch, 0).to(batch.tokens.device)
            outputs = self._outputs(batch)
            still = torch.ones_like(starts)
            for depth, output in enumerate(outputs):
                chosen = self._vocabulary[self._logits(output).argmax(dim=-1)]
                is_right = (chosen[:, :-1] == batch.tokens[:, 2:]) & starts
                # A path from i has its prediction of this depth at i + depth.
                here, ahead = starts[:, : starts.shape[1] - depth], starts[:, depth:]
                counted = here & ahead & still[:, : here.shape[1]]
                right[depth] += float((counted & is_right[:, depth:]).sum())
                known[depth] += float(counted.sum())
                still = counted & is_right[:, depth:]
                accepted += float(still.sum())
            paths += float(starts.sum())
        head.train()
        slots = tuple((right / known.clamp(min=1)).tolist())
        return Measured(slots, 1 + accepted / max(1.0, paths))

    def _step(self, batch: TextBatch, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
        plan, head = self._plan, self._head
        # These are found on the CPU, so that no step waits for the device.
        drafted = [self._drafted(batch, depth).flatten().nonzero().flatten() for depth in range(plan.depths)]
        first = torch.full((batch.tokens.shape[0] * (batch.tokens.shape[1] - 2),), -1)
        first[drafted[0]] = torch.arange(len(drafted[0]))
        device = batch.tokens.device
        final = batch.final[:, 1:-1].flatten(0, 1)[drafted[0].to(device, non_blocking=True)]
        wanted = target_probabilities(self._target, final, self._vocabulary)
        loss, weights = wanted.new_zeros(()), 0.0
        for depth, output in enumerate(self._outputs(batch)):
            if len(drafted[depth]):
                places = drafted[depth].to(device, non_blocking=True)
                logits = self._logits(output[:, :-1].flatten(0, 1)[places]).float()
                goal = wanted[first[drafted[depth]].to(device, non_blocking=True)]
                loss = loss + plan.decay**depth * torch.nn.functional.cross_entropy(logits, goal)
                weights += plan.decay**depth
        loss = loss / weights
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), plan.gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _outputs(self, batch: TextBatch) -> list[Tensor]:
        """The outputs of each depth at all positions of a batch but the last one."""
        following = self._embedding[batch.tokens[:, 1:]].float()
        with self._autocast():
            return roll_out(self._head, batch.taps[:, :-1], following, self._plan.depths)

    def _logits(self, outputs: Tensor) -> Tensor:
        with self._autocast():
            return self._head.logits(outputs)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._embedding.device.type, torch.bfloat16, enabled=self._plan.is_bfloat16)

    def _drafted(self, batch: TextBatch, depth: int) -> Tensor:
        """Positions [rows, length - 2] whose output of this depth predicts a token of the answer, on the CPU."""
        places = torch.arange(batch.tokens.shape[1] - 2)
        return (places >= batch.first.unsqueeze(1) + depth) & (places < batch.lengths.unsqueeze(1) - 2)

    def _batches(self, texts: TextStates) -> Iterator[tuple[int, list[int]]]:
        """Epochs and the texts of each batch, without end. Raises `ConfigurationError` without a text."""
        usable = texts.learnable
        if not usable:
            raise ConfigurationError("texts: needed an answer of two tokens within the longest length, found none")
        epoch = 0
        while True:
            draw = random.Random(f"{self._plan.seed}:{epoch}")  # noqa: S311 - an order, not a secret
            order = draw.sample(usable, len(usable))
            batches = _grouped(order, texts.lengths, self._plan.batch_tokens)
            draw.shuffle(batches)
            yield from ((epoch, batch) for batch in batches)
            epoch += 1

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Muon (Jordan et al. 2024) for the matrices of the layer, AdamW for vectors and the output matrix."""
        plan = self._plan
        named = dict(self._head.named_parameters())
        head = [named.pop(LM_HEAD)]
        inner = [value for value in named.values() if value.dim() == 2]
        vectors = [value for value in named.values() if value.dim() == 1]
        rate = plan.learning_rate
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": head, "weight_decay": plan.weight_decay}]
        muon = torch.optim.Muon(
            inner, lr=rate, weight_decay=plan.weight_decay, ns_steps=4, adjust_lr_fn="match_rms_adamw"
        )
        return muon, torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def _grouped(order: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Texts in batches of at most so many tokens with padding, or one text; neighbours are sorted by length."""
    mean = sum(lengths[row] for row in order) / max(1, len(order))
    neighbours = max(1, int(_NEIGHBOURS * most_tokens / max(1.0, mean)))
    batches: list[list[int]] = []
    for start in range(0, len(order), neighbours):
        batches.append([])
        for row in sorted(order[start : start + neighbours], key=lengths.__getitem__):
            if batches[-1] and (len(batches[-1]) + 1) * lengths[row] > most_tokens:
                batches.append([])
            batches[-1].append(row)
    return batches


def _state(step: int, seconds: float, losses: Sequence[Tensor], epoch: int) -> State:
    loss = float(torch.stack(list(losses)).mean())
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss before step {step} is {loss}")
    return State(step, seconds, loss, epoch)
