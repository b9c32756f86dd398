"""The training loop, its learning rate schedule and its checkpoints, for whatever learns."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.checkpoints import Progress, load_checkpoint, save_checkpoint
from workers.distill.divergence import divergence_named
from workers.distill.examples import batches_of_epoch

Clock = Callable[[], float]
Report = Callable[[Progress, float], None]
"""Called after each step with the progress and the finished share of the training, between 0 and 1."""

_LOSS_EVERY = 20
"""Number of steps whose mean loss is one point of the loss curve."""


class Learner(Protocol):
    """What the loop trains."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that are trained and stored, by name."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers; together they have all parameters. A group may have a `scale` of the learning rate."""

    def loss(self, answers: Sequence[Answer], number: int) -> tuple[Tensor, int]:
        """The loss of one batch at step `number`, and the number of positions that it covers."""

    def measure(self) -> float | None:
        """The quality on held-out answers; `None` where there are none."""


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

    def fingerprint(self, parameters: Mapping[str, Tensor], vocabulary: Tensor) -> str:
        """A hash, equal for trainings that may continue each other's checkpoints.

        `parameters` must not be trained yet; `vocabulary` is the row of the head of each token. The length of the
        training and the answers may differ.
        """
        values = asdict(self) | {"steps": None, "seconds": None, "checkpoint_seconds": None}
        found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        for name, value in parameters.items():  # the initial weights
            found.update(f"{name} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().numpy().tobytes())
        found.update(vocabulary.cpu().numpy().tobytes())
        return found.hexdigest()[:16]


class TrainingLoop:
    """Trains one learner on answers. After an interruption, `run()` continues from the last checkpoint."""

    def __init__(
        self,
        learner: Learner,
        answers: Sequence[Answer],
        plan: TrainingPlan,
        checkpoint: Path,
        fingerprint: str,
        clock: Clock = time.monotonic,
    ) -> None:
        # A prompt that fills the whole length leaves no position to train on.
        learnable = [answer for answer in answers if len(answer.prompt) < plan.max_length and answer.answer]
        if not learnable:
            raise ConfigurationError(f"training: needed an answer within max_length ({plan.max_length}), found none")
        self._learner = learner
        self._answers = learnable
        self._plan = plan
        self._checkpoint = checkpoint
        self._fingerprint = fingerprint
        self._clock = clock

    def run(self, report: Report) -> Progress:
        """Train until the plan is finished. Raises `ConfigurationError` for a checkpoint of another training."""
        plan, learner = self._plan, self._learner
        progress = (
            load_checkpoint(self._checkpoint, learner.parameters, learner.optimizers, self._fingerprint) or Progress()
        )
        begun = self._clock() - progress.seconds
        saved, recent_losses = progress.seconds, []
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
                self._measure(progress)
        self._measure(progress)
        self._save(progress)
        return progress

    def _remaining_batches(self, progress: Progress) -> Iterator[tuple[int, ...]]:
        plan = self._plan
        batches = batches_of_epoch(self._answers, progress.epoch, plan.seed, plan.batch_tokens, plan.max_length)
        return iter(batches[progress.batch :])

    def _step(self, indices: Sequence[int], done: float, number: int) -> tuple[float, int]:
        plan, learner = self._plan, self._learner
        for optimizer in learner.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(plan, done) * group.get("scale", 1.0)
        loss, positions = learner.loss([self._answers[index] for index in indices], number)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(learner.parameters.values(), plan.gradient_norm)
        for optimizer in learner.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), positions

    def _done(self, progress: Progress) -> float:
        plan = self._plan
        if plan.steps is not None:
            return progress.step / plan.steps
        return progress.seconds / (plan.seconds or math.inf)

    def _measure(self, progress: Progress) -> None:
        if progress.agreements and progress.agreements[-1][0] == progress.step:
            return
        found = self._learner.measure()
        if found is not None:
            progress.agreements.append((progress.step, progress.seconds, found))

    def _save(self, progress: Progress) -> None:
        save_checkpoint(
            self._checkpoint, self._learner.parameters, self._learner.optimizers, progress, self._fingerprint
        )


def learning_rate(plan: TrainingPlan, done: float) -> float:
    """The learning rate at the finished share `done`: a linear rise, then a cosine to 0 (Loshchilov & Hutter 2017)."""
    if done < plan.warm_up:
        return plan.learning_rate * max(done / plan.warm_up, 0.01)
    share = min(1.0, (done - plan.warm_up) / max(1e-9, 1 - plan.warm_up))
    return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
