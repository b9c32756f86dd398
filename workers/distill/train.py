"""The training loop, its learning rate schedule and its checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.core.errors import ConfigurationError
from workers.distill.agreement import agreement, share
from workers.distill.answers import Answer
from workers.distill.checkpoints import Progress, load_checkpoint, save_checkpoint
from workers.distill.divergence import distillation_loss, divergence_named
from workers.distill.examples import Batch, batches_of_epoch, make_batch
from workers.distill.policy import on_policy
from workers.distill.student import Student

Clock = Callable[[], float]
Report = Callable[[Progress, float], None]
"""Called after each step with the progress and the finished share of the training, between 0 and 1."""

_LOSS_EVERY = 20
"""Number of steps whose mean loss is one point of the loss curve."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Settings of a training. It takes `steps` or `seconds`, and the learning rate schedule spans it."""

    loss: str = "forward_kl"
    """`forward_kl` or `reverse_kl`."""
    on_policy: float = 0.0
    """Share of the batches whose answers the student writes."""
    learning_rate: float = 1e-3
    warm_up: float = 0.03
    """Share of the training in which the learning rate rises. Afterwards it falls to 0 along a cosine."""
    weight_decay: float = 0.01
    gradient_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    batch_tokens: int = 4096
    """Most tokens of a batch, padding included."""
    max_length: int = 512
    """Most tokens of prompt and answer together. Longer answers are cut."""
    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of matrix products. Weights are float32."""
    steps: int | None = None
    """Length of the training in steps; `None` if it is given in seconds."""
    seconds: float | None = None
    """Length of the training in seconds; `None` if it is given in steps."""
    checkpoint_seconds: float = 120.0
    """Time between checkpoints, in seconds."""

    def __post_init__(self) -> None:
        divergence_named(self.loss)
        if (self.steps is None) == (self.seconds is None):
            raise ConfigurationError("training: needed a number of steps or of minutes, and not both")
        if not 0 <= self.on_policy <= 1:
            raise ConfigurationError(f"on_policy: {self.on_policy} is refused; it must be within 0 and 1")

    def fingerprint(self, student: Student) -> str:
        """A hash, equal for trainings that may continue each other's checkpoints. `student` must not be trained yet.

        The length of the training and the answers may differ.
        """
        values = asdict(self) | {"steps": None, "seconds": None, "checkpoint_seconds": None}
        found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        for name, value in student.own_parameters().items():  # the initial weights
            found.update(f"{name} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().numpy().tobytes())
        found.update(student.position_in_head.cpu().numpy().tobytes())
        return found.hexdigest()[:16]


class Training:
    """Trains one student. After an interruption, `run()` continues from the last checkpoint."""

    def __init__(
        self,
        student: Student,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        plan: TrainingPlan,
        directory: Path,
        *,
        target: PreTrainedModel | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        # A prompt that fills the whole length leaves no position to train on.
        learnable = [answer for answer in answers if len(answer.prompt) < plan.max_length and answer.answer]
        if not learnable:
            raise ConfigurationError(f"training: needed an answer within max_length ({plan.max_length}), found none")
        if plan.on_policy > 0 and target is None:
            raise ConfigurationError("on_policy: needed the target, for its probabilities of the student's answers")
        self._student = student
        self._answers = learnable
        self._held_out = held_out
        self._plan = plan
        self._directory = directory
        self._target = target
        self._clock = clock
        self._optimizer = torch.optim.AdamW(
            _groups(student, plan.weight_decay), lr=plan.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._fingerprint = plan.fingerprint(student)

    def run(self, report: Report) -> Progress:
        """Train until the plan is finished. Raises `ConfigurationError` for a checkpoint of another training."""
        plan = self._plan
        progress = load_checkpoint(self._directory, self._student, self._optimizer, self._fingerprint) or Progress()
        begun = self._clock() - progress.seconds
        saved, recent_losses = progress.seconds, []
        self._student.train()
        while (done := self._done(progress)) < 1:
            for indices in self._remaining_batches(progress):
                loss, positions = self._step(indices, done, progress.step)
                recent_losses.append(loss)
                progress.step += 1
                progress.batch += 1
                progress.answer_tokens += positions
                progress.seconds = self._clock() - begun
                if len(recent_losses) == _LOSS_EVERY:
                    progress.losses.append((progress.step, progress.seconds, sum(recent_losses) / len(recent_losses)))
                    recent_losses = []
                if progress.seconds - saved >= plan.checkpoint_seconds:
                    self._save(progress)
                    saved = progress.seconds
                done = self._done(progress)
                report(progress, done)
                if done >= 1:
                    break
            else:
                progress.epoch, progress.batch = progress.epoch + 1, 0
                self._evaluate(progress)
        self._evaluate(progress)
        self._save(progress)
        return progress

    def _remaining_batches(self, progress: Progress) -> Iterator[tuple[int, ...]]:
        plan = self._plan
        batches = batches_of_epoch(self._answers, progress.epoch, plan.seed, plan.batch_tokens, plan.max_length)
        return iter(batches[progress.batch :])

    def _step(self, indices: Sequence[int], done: float, number: int) -> tuple[float, int]:
        plan, student = self._plan, self._student
        batch = self._batch(indices, number)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(plan, done)
        loss = self._loss(batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.own_parameters().values(), plan.gradient_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), len(batch.labels)

    def _loss(self, batch: Batch) -> Tensor:
        plan, student = self._plan, self._student
        device = student.head.device
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bfloat16"):
            hidden = student.hidden(batch.tokens).flatten(0, 1)[batch.selected]
            logits = student.logits(hidden)
        rows = student.position_in_head
        leading = rows[batch.leading_tokens.clamp(min=0)].masked_fill(batch.leading_tokens < 0, -1)
        return distillation_loss(logits, leading, batch.leading_log_probabilities, divergence_named(plan.loss))

    def _batch(self, indices: Sequence[int], number: int) -> Batch:
        plan = self._plan
        chosen = [self._answers[index] for index in indices]
        device = self._student.head.device
        # On-policy batches are spread evenly over the steps.
        own = math.floor((number + 1) * plan.on_policy) > math.floor(number * plan.on_policy)
        if own and self._target is not None:
            return on_policy(self._student, self._target, chosen, plan.max_length, plan.seed + number).to(device)
        return make_batch(chosen, plan.max_length).to(device)

    def _done(self, progress: Progress) -> float:
        plan = self._plan
        if plan.steps is not None:
            return progress.step / plan.steps
        return progress.seconds / (plan.seconds or math.inf)

    def _evaluate(self, progress: Progress) -> None:
        if not self._held_out or (progress.agreements and progress.agreements[-1][0] == progress.step):
            return
        plan = self._plan
        counts = agreement(
            self._student, self._held_out, plan.batch_tokens, plan.max_length, plan.precision == "bfloat16"
        )
        progress.agreements.append((progress.step, progress.seconds, share(counts)))

    def _save(self, progress: Progress) -> None:
        save_checkpoint(self._directory, self._student, self._optimizer, progress, self._fingerprint)


def learning_rate(plan: TrainingPlan, done: float) -> float:
    """The learning rate at the finished share `done`: a linear rise, then a cosine to 0 (Loshchilov & Hutter 2017)."""
    if done < plan.warm_up:
        return plan.learning_rate * max(done / plan.warm_up, 0.01)
    share = min(1.0, (done - plan.warm_up) / max(1e-9, 1 - plan.warm_up))
    return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def _groups(student: Student, weight_decay: float) -> list[dict[str, object]]:
    """Optimizer groups: matrices have weight decay; gains and biases do not."""
    own = list(student.own_parameters().values())
    return [
        {"params": [value for value in own if value.dim() > 1], "weight_decay": weight_decay},
        {"params": [value for value in own if value.dim() <= 1], "weight_decay": 0.0},
    ]
