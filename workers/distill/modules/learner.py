"""Trains a drafting module on the target's answers and stored hidden states."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.distill.answers import Answer
from workers.distill.checkpoints import Progress
from workers.distill.loop import Clock, EarlyStopping, Report, TrainingLoop, TrainingPlan
from workers.distill.modules.batches import TapBatch, TapSource, tap_batch
from workers.distill.modules.path_loss import PathWeights, accepted, path_loss
from workers.distill.modules.paths import Paths, predict
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import DraftingModule
from workers.model.drafting.selector import Selector

_MEASURED_PATHS = 4096
"""Paths of held-out answers that one measurement covers, at most."""
_MEASURED_ROWS = 4
_COUNTED_PATHS = 256
"""Paths whose logits are in memory at once in a measurement, at most."""


@dataclass(frozen=True, slots=True)
class TappedModule:
    """A drafting module, the target's ends, and the hidden states that it reads."""

    module: DraftingModule
    ends: TargetEnds
    cache: TapSource

    @property
    def selector(self) -> Selector | None:
        """The selector of the module, if it has one."""
        found = getattr(self.module, "selector", None)
        return found if isinstance(found, Selector) else None


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Settings of a module's training."""

    training: TrainingPlan
    """The settings of the loop."""
    taps: tuple[int, ...] = ()
    """Layers of the target after which the module reads hidden states."""
    decay: float = 0.8
    """Weight of a depth relative to the depth before."""
    paths: int = 384
    """Paths of a batch that the loss covers, drawn at random."""
    depths: int = 3
    """Roll-outs of an EAGLE head in training."""
    measured_depths: int = 5
    """Roll-outs of an EAGLE head when it is measured."""
    layer_scale: float = 1.0
    """Learning rate of decoder layers relative to the other parameters: lower where they are trained already."""
    optimizer: str = "muon"
    """`muon` (Jordan et al. 2024) for matrices and AdamW for vectors, or `adamw` for all."""


class ModuleTraining:
    """Trains the parameters of a module that need gradients; see `TrainingLoop` for `checkpoint`."""

    def __init__(
        self,
        tapped: TappedModule,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        plan: ModulePlan,
        checkpoint: Path | None,
        *,
        early_stopping: EarlyStopping | None = None,
    ) -> None:
        self._module = tapped.module
        learner = ModuleLearner(tapped, held_out, plan)
        self._loop = TrainingLoop(learner, answers, plan.training, checkpoint, early_stopping=early_stopping)

    def run(self, report: Report, clock: Clock = time.monotonic) -> Progress:
        """Train until the plan is finished or nothing improves; see `TrainingLoop.run`."""
        self._module.train()
        return self._loop.run(report, clock)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far greedy chains of a module agree with written answers."""

    paths: int
    reached: tuple[int, ...]
    """Paths whose first 1, 2, ... tokens are all right."""

    @property
    def tokens_per_step(self) -> float:
        """The estimated tokens of one step of the target: the accepted tokens and one of its own."""
        return 1 + sum(self.reached) / max(1, self.paths)


def measure(
    tapped: TappedModule, answers: Sequence[Answer], max_length: int, depths: int, *, autocast: bool
) -> Acceptance:
    """Measure on answers; use greedy ones, since tokens are compared. At most 4,096 positions are drawn."""

    def lengths_of(paths: Paths, batch: TapBatch) -> Tensor:
        return accepted(paths, batch, tapped.ends, tapped.selector)

    lengths = over_paths(tapped, answers, max_length, depths, lengths_of, autocast=autocast)
    found = torch.cat(lengths) if lengths else torch.zeros(0, dtype=torch.long)
    most = int(found.max()) if len(found) else 0
    return Acceptance(len(found), tuple(int((found > depth).sum()) for depth in range(most)))


def over_paths(
    tapped: TappedModule,
    answers: Sequence[Answer],
    max_length: int,
    depths: int,
    count: Callable[[Paths, TapBatch], Tensor],
    *,
    autocast: bool,
) -> list[Tensor]:
    """What `count` finds in the predictions from at most 4,096 positions drawn from the answers, some at a time."""
    module, ends, cache = tapped.module, tapped.ends, tapped.cache
    was_training = module.training
    module.eval()
    device = ends.head.device
    generator = torch.Generator().manual_seed(0)
    chosen = [answer for answer in answers if cache.has(answer) and len(answer.prompt) < max_length]
    batches = [chosen[start : start + _MEASURED_ROWS] for start in range(0, len(chosen), _MEASURED_ROWS)]
    limit = max(1, _MEASURED_PATHS // max(1, len(batches)))
    found: list[Tensor] = []
    for rows in batches:
        batch = tap_batch(rows, cache, ends, max_length)
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            paths = predict(module, ends, batch, limit, generator, depths)
            found += [count(part, batch) for part in paths.parts(_COUNTED_PATHS)]
    module.train(was_training)
    return found


class ModuleLearner:
    """Computes the losses of a module. It is a `Learner`."""

    def __init__(self, tapped: TappedModule, held_out: Sequence[Answer], plan: ModulePlan) -> None:
        self._tapped = tapped
        self._held_out = held_out
        self._plan = plan
        self.vocabulary = tapped.ends.row_of
        self.identity = json.dumps([plan.optimizer, plan.taps])
        self.parameters: Mapping[str, nn.Parameter] = {
            name: value for name, value in tapped.module.named_parameters() if value.requires_grad
        }
        self.optimizers: Sequence[torch.optim.Optimizer] = _optimizers(self.parameters, plan)

    def loss(self, answers: Sequence[Answer], number: int) -> tuple[Tensor, int]:
        tapped, longest = self._tapped, self._plan.training.max_length
        return self.loss_of(tap_batch(answers, tapped.cache, tapped.ends, longest), number)

    def loss_of(self, batch: TapBatch, number: int) -> tuple[Tensor, int]:
        """The loss of a batch at step `number`, and the number of positions that it covers."""
        plan, training, ends = self._plan, self._plan.training, self._tapped.ends
        generator = torch.Generator().manual_seed(training.seed * 1_000_003 + number)
        with torch.autocast(ends.head.device.type, torch.bfloat16, enabled=training.precision == "bfloat16"):
            paths = predict(self._tapped.module, ends, batch, plan.paths, generator, plan.depths)
            counted = PathWeights(plan.decay, training.rejection_weight, training.overlap_weight)
            loss = path_loss(paths, batch, ends, self._tapped.selector, counted, training.loss)
        return loss, len(paths.starts)

    def measure(self) -> float | None:
        if not self._held_out:
            return None
        training, depths = self._plan.training, self._plan.measured_depths
        is_bfloat16 = training.precision == "bfloat16"
        found = measure(self._tapped, self._held_out, training.max_length, depths, autocast=is_bfloat16)
        return found.tokens_per_step


def _optimizers(parameters: Mapping[str, nn.Parameter], plan: ModulePlan) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for weight matrices, AdamW for vectors; a stack of vectors is no matrix."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, value in parameters.items():
        is_matrix = name.endswith(("weight", "weights")) and value.dim() == 2
        groups.setdefault((is_matrix, name.startswith("layers.")), []).append(value)
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (is_matrix, is_layer), values in groups.items():
        scale = plan.layer_scale if is_layer else 1.0
        decay = plan.training.weight_decay if is_matrix else 0.0
        uses_muon = is_matrix and plan.optimizer == "muon"
        found[uses_muon].append({"params": values, "scale": scale, "weight_decay": decay})
    rate = plan.training.learning_rate
    optimizers: list[torch.optim.Optimizer] = []
    if found[True]:
        optimizers.append(torch.optim.Muon(found[True], lr=rate, ns_steps=4, adjust_lr_fn="match_rms_adamw"))
    if found[False]:
        optimizers.append(torch.optim.AdamW(found[False], lr=rate, betas=(0.9, 0.95)))
    return tuple(optimizers)
