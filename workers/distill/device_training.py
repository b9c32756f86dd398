"""Trains a draft on texts whose hidden states are on the device, in one process.

Steps read nothing back from the device: losses are read when they are reported.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.descent import descend, learning_rate
from workers.distill.peers import ALONE, Peers, own

_PAUSES = 9.0
"""Time between two reports relative to the time that the former took."""

Module = TypeVar("Module", bound=nn.Module)
Texts = TypeVar("Texts")
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Settings of a training. It ends after `steps`, or after `seconds` where `steps` is `None`."""

    seconds: float = 0.0
    steps: int | None = None
    decay: float = 0.8
    """Weight of a depth of a draft relative to the depth before."""
    learning_rate: float = 1e-3
    warm_up: float = 0.03
    """Share of the training in which the learning rate rises."""
    weight_decay: float = 0.01
    gradient_norm: float = 1.0
    is_bfloat16: bool = True
    """Whether matrices are multiplied in bfloat16. Parameters are float32."""
    recomputes: bool = False
    """Whether a layer's activations are computed again for the backward pass instead of kept in memory."""
    seed: int = 0
    parts: int = 1
    """Each batch has as many texts from each part: of numbers 0, n, 2n, …, of numbers 1, n + 1, …, and so on.

    One process with n parts draws the batches that n processes draw.
    """
    report_steps: int | None = None
    """Steps between two reports, instead of seconds. Several processes need it, and `steps`: their clocks differ."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a training goes on whose module and optimizers have the state of then."""

    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """How well a draft drafts texts that it was not trained on."""

    slots: tuple[float, ...]
    """For each depth, the share of tokens that are right after right ones, in greedy chains."""
    chain: float
    """Tokens that one step of the target adds with greedy chains of all depths."""
    trees: Mapping[int, float] = field(default_factory=dict)
    """Tokens per step with trees of so many nodes; empty for a draft that is measured in chains alone."""

    @property
    def tokens_per_step(self) -> float:
        """The most tokens per step that were measured: those of the best tree, or of chains."""
        return max(self.trees.values(), default=self.chain)

    def __str__(self) -> str:
        slots = " ".join(f"{share:.1%}" for share in self.slots)
        trees = "".join(f", {found:.3f} with {size} nodes" for size, found in self.trees.items())
        return f"{self.chain:.3f} tokens per step in a chain (slots {slots}){trees}"


@dataclass(frozen=True, slots=True)
class State:
    """The state of a training."""

    step: int
    seconds: float
    loss: float
    """The mean loss since the last state."""
    right: float | None
    """The mean share of drafted tokens since then that are the target's most probable ones; `None`: not counted."""
    epoch: int

    def __str__(self) -> str:
        pace = self.step / max(1e-9, self.seconds)
        right = "" if self.right is None else f", right {self.right:.1%}"
        return (
            f"{self.seconds:.0f} s: epoch {self.epoch}, step {self.step} ({pace:.1f} a second), loss {self.loss:.4f}"
            f"{right}"
        )


class DeviceTraining(ABC, Generic[Module, Texts, Batch]):
    """Trains one draft for a target. A kind of draft says what a batch is, and its loss."""

    def __init__(self, head: Tensor, module: Module, plan: DevicePlan, peers: Peers = ALONE) -> None:
        """`head` [vocabulary, hidden size] is the matrix of the target's logits, on the device.

        `peers` train with this process; they have sharded the module.
        """
        self._head, self._module, self._plan, self._peers = head.detach(), module, plan, peers
        self._device = head.device
        if peers.count > 1 and (plan.steps is None or plan.report_steps is None):
            raise ConfigurationError("steps: needed a number of steps, since several processes train together")

    @property
    def module(self) -> Module:
        """What is trained."""
        return self._module

    @cached_property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Optimizers that have all parameters together."""
        return self._optimizers()

    @abstractmethod
    def measure(self, texts: Texts) -> Measured:
        """Measure on texts of greedy answers."""

    @abstractmethod
    def _batches(self, texts: Texts) -> Iterator[tuple[int, Batch]]:
        """Epochs and batches, without end."""

    @abstractmethod
    def _losses(self, texts: Texts, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is minimised, and what is reported of it: [loss], or [loss, share of right tokens]."""

    @abstractmethod
    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Optimizers that have all parameters together."""

    def run(
        self,
        texts: Texts,
        report: Callable[[State], None],
        report_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        resumed: Resumed = Resumed(),
    ) -> State:
        """Train. `report` is called each `report_seconds` or `report_steps` of the plan, and at the end.

        Reports that take long are fewer, so that they take a tenth of the time at most. With 0 seconds, each step has
        one.
        A training that is resumed takes the batches that it would have taken.

        Raises `ConfigurationError` without a text to learn from, and instead of a report if the loss or parameters are
        not finite.
        """
        plan = self._plan
        optimizers = self.optimizers
        reported = clock()
        began = reported - resumed.seconds
        state, found, pause = State(0, 0.0, math.nan, None, 0), list[Tensor](), report_seconds
        step = resumed.step
        self._module.train()
        for epoch, batch in islice(self._batches(texts), step, None):
            seconds = clock() - began
            done = step / plan.steps if plan.steps is not None else seconds / max(1e-9, plan.seconds)
            if done >= 1:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(plan.learning_rate, plan.warm_up, done)
            found.append(self._step(texts, batch, optimizers))
            step += 1
            every = plan.report_steps
            if step % every == 0 if every is not None else clock() - reported >= pause:
                begun = clock()
                state = self._state(step, begun - began, found, epoch)
                report(state)
                reported = clock()
                pause = report_seconds and max(report_seconds, (reported - begun) * _PAUSES)
                found.clear()
        if found:
            state = self._state(step, clock() - began, found, epoch)
            report(state)
        return state

    def run_to_best(self, texts: Texts, measured: Texts) -> None:
        """Train, and end with the state that drafts other texts best: the first one, or one that was reported.

        The plan must name `steps` and `report_steps`. Raises as `run` does.
        """
        best, kept = -math.inf, dict[str, Tensor]()
        trained = {name: one for name, one in self._module.named_parameters() if one.requires_grad}

        def measure(_: State | None = None) -> None:
            nonlocal best
            found = self.measure(measured).tokens_per_step
            if found > best:
                best = found
                kept.update({name: one.detach().clone() for name, one in trained.items()})

        measure()
        self.run(texts, measure, math.inf)
        self._module.load_state_dict(kept, strict=False)

    def _step(self, texts: Texts, batch: Batch, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
        loss, reported = self._losses(texts, batch)
        descend(loss, self._module.parameters(), optimizers, self._plan.gradient_norm)
        return reported.detach()

    def _state(self, step: int, seconds: float, found: Sequence[Tensor], epoch: int) -> State:
        """The state from the losses of some steps, which are read here alone; those of all peers are summed."""
        mean = torch.stack(list(found)).mean(dim=0)
        # The mean loss may be finite while the last step has left parameters that are not.
        broken = torch.stack([(~own(one).isfinite()).any() for one in self._module.parameters()]).sum()
        loss, *right, count = self._peers.summed(torch.cat([mean, broken.to(mean.dtype).reshape(1)])).tolist()
        if count or not math.isfinite(loss):
            lost = f"the loss is {loss}" if not math.isfinite(loss) else "the draft has parameters that are not finite"
            raise ConfigurationError(
                f"--learning-rate: {self._plan.learning_rate:g} is refused; it must be lower: at step {step}, {lost}"
            )
        return State(step, seconds, loss, right[0] if right else None, epoch)

    def _checked_parts(self) -> int:
        parts, count = self._plan.parts, self._peers.count
        if count not in (1, parts):
            raise ConfigurationError(f"parts: {parts} is refused; it must be {count}, the number of processes")
        return parts

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._plan.is_bfloat16)

    def _muon(self, matrices: Sequence[nn.Parameter]) -> torch.optim.Muon:
        """Muon (Jordan et al. 2024) with the rates of AdamW."""
        plan = self._plan
        return torch.optim.Muon(
            matrices, lr=plan.learning_rate, weight_decay=plan.weight_decay, ns_steps=4, adjust_lr_fn="match_rms_adamw"
        )
