"""The training loop, its learning rate schedule, early stopping and checkpoints, for whatever learns."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.budget import StepTimes
from workers.distill.checkpoints import Progress, load_checkpoint, save_checkpoint
from workers.distill.descent import descend, learning_rate
from workers.distill.divergence import divergence_named
from workers.distill.examples import batches_of_epoch
from workers.distill.options import DistillOptions

Clock = Callable[[], float]
Report = Callable[[Progress, float], None]
"""Called after each step with the progress and the finished share of the training, between 0 and 1."""

_LOSS_EVERY = 20
"""Number of steps whose mean loss is one point of the loss curve."""
_LONG_STEP = 0.05
"""Share of the training's time from which on a step is called long."""


class Learner(Protocol):
    """What the loop trains."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that are trained and stored, by name."""

    @property
    def vocabulary(self) -> Tensor:
        """The row of the head of each token; it identifies what is trained."""

    @property
    def identity(self) -> str:
        """What else the training depends on, beside the plan of the loop; empty for nothing."""

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
    """The name of the divergence that is minimised, one of `DIVERGENCES`."""
    overlap_weight: float = 0.0
    """Weight of the share of tokens that the best coupling rejects, added to the divergence."""
    rejection_weight: float = 1.0
    """Weight of a token at which the target would reject the draft's own greedy one, relative to the others."""
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
        divergence_named(self.loss, self.overlap_weight)
        if (self.steps is None) == (self.seconds is None):
            raise ConfigurationError("training: needed a number of steps or of minutes, and not both")
        if not 0 <= self.on_policy <= 1:
            raise ConfigurationError(f"on_policy: {self.on_policy} is refused; it must be within 0 and 1")

    def fingerprint(self, parameters: Mapping[str, Tensor], vocabulary: Tensor, identity: str) -> str:
        """A hash, equal for trainings that may continue each other's checkpoints.

        `parameters` must not be trained yet; `vocabulary` is the row of the head of each token, and
        `identity` what else the training depends on. The length of the training and the answers may differ.
        """
        values = asdict(self) | {"steps": None, "seconds": None, "checkpoint_seconds": None}
        found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
        for name, value in parameters.items():  # the initial weights
            found.update(f"{name} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().numpy().tobytes())
        found.update(vocabulary.cpu().numpy().tobytes() + identity.encode())
        return found.hexdigest()[:16]


def training_plan(options: DistillOptions) -> TrainingPlan:
    """The settings of the training that a command's options ask for. Raises `ConfigurationError`."""
    return TrainingPlan(
        loss=options.loss,
        overlap_weight=options.overlap_weight or 0.0,
        rejection_weight=options.rejection_weight,
        on_policy=options.on_policy,
        learning_rate=options.learning_rate,
        batch_tokens=options.batch_tokens,
        max_length=options.max_length,
        seed=options.seed,
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
        steps=options.steps,
        seconds=None if options.minutes is None else options.minutes * 60,
    )


def long_steps(progress: Progress, plan: TrainingPlan) -> str:
    """Say that a training ended early or late because its steps are long; empty where they are not."""
    if plan.seconds is None or progress.longest_step <= _LONG_STEP * plan.seconds:
        return ""
    left = plan.seconds - progress.seconds
    if left > progress.longest_step:
        return ""
    when = f"{left:.1f} s before" if left >= 0 else f"{-left:.1f} s after"
    return (
        f"training ended {when} its time, after {progress.step} steps: one takes up to {progress.longest_step:.1f} s; "
        "a smaller --batch-tokens makes them shorter"
    )


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """When a training is measured as it is served, and when it ends because nothing improves.

    The first measure comes before the first step and the last one after the last step. The best parameters are kept.
    """

    measure: Callable[[], float | None]
    """The tokens per step of a cluster that serves what is trained now; `None` if it cannot be measured."""
    identity: str = ""
    """Names the prompts and settings of `measure`. What a run before measured with others is forgotten."""
    interval: float = 0.1
    """Least share of the training between two measures."""
    cost: float = 0.1
    """Most of the training's time that measures may take, as a share; the last measure is not counted."""
    first_seconds: float = 15.0
    """Time that the first measure is expected to take, in seconds; later ones as long as the longest so far."""
    patience: int = 4
    """Measures in a row that bring nothing before the training ends."""


_MOST_RESERVED = 0.25
"""Largest share of a training that is kept for its last measure. A measure that takes longer ends after it."""
_NO_MEASURES = EarlyStopping(lambda: None, cost=0.0)


class _Measures:
    """The measures of one run: when the next one is due, and whether the training still improves."""

    def __init__(self, rules: EarlyStopping, clock: Clock, progress: Progress, done: float) -> None:
        self._rules, self._clock = rules, clock
        # A run that continues measures at the next multiple of the interval.
        self._next = (done // rules.interval + 1) * rules.interval if progress.served else done
        self._spent, self._longest = 0.0, rules.first_seconds
        self._stale = 0  # measures since the best one of this run
        self._reserve = 0.0  # seconds that are kept for the last measure

    def must_end(self, progress: Progress, seconds: float | None) -> bool:
        """Whether measures in a row brought nothing, or another step and the last measure do not fit `seconds`."""
        needed = progress.longest_step + self._reserve
        is_late = needed > 0 and seconds is not None and progress.seconds + needed > seconds
        return is_late or self._stale >= self._rules.patience

    def is_due(self, done: float, seconds: float) -> bool:
        """Whether to measure now. `seconds` is the length of the whole training."""
        return done >= self._next and self._spent + self._longest <= self._rules.cost * seconds

    def take(self, progress: Progress, parameters: Mapping[str, nn.Parameter], done: float, seconds: float) -> None:
        """Measure, and keep the parameters if they are the best so far. Nothing happens at a measured step."""
        if progress.served and progress.served[-1][0] == progress.step:
            return
        begun = self._clock()
        found = self._rules.measure()
        took = self._clock() - begun
        self._spent += took
        self._reserve = max(self._reserve, min(took, _MOST_RESERVED * seconds))
        self._longest = took if self._spent == took else max(self._longest, took)
        share = self._rules.cost * seconds
        self._next = done + max(self._rules.interval, took / share if share > 0 else 0.0)
        if found is None:
            return
        self._stale += 1
        if found > progress.best_served:
            self._stale = 0
            progress.best = {name: value.detach().to("cpu", copy=True) for name, value in parameters.items()}
        progress.served.append((progress.step, progress.seconds, progress.answer_tokens, found))


class TrainingLoop:
    """Trains one learner on answers. After an interruption, `run()` continues from the last checkpoint."""

    def __init__(
        self,
        learner: Learner,
        answers: Sequence[Answer],
        plan: TrainingPlan,
        checkpoint: Path | None,
        early_stopping: EarlyStopping | None = None,
    ) -> None:
        """`checkpoint` is the file that keeps the state of the training; `None`: it cannot be continued."""
        # A prompt that fills the whole length leaves no position to train on.
        learnable = [answer for answer in answers if len(answer.prompt) < plan.max_length and answer.answer]
        if not learnable:
            raise ConfigurationError(f"training: needed an answer within max_length ({plan.max_length}), found none")
        self._learner = learner
        self._answers = learnable
        self._plan = plan
        self._checkpoint = checkpoint
        self._fingerprint = plan.fingerprint(learner.parameters, learner.vocabulary, learner.identity)
        self._early_stopping = early_stopping or _NO_MEASURES

    def run(self, report: Report, clock: Clock = time.monotonic) -> Progress:
        """Train until the plan is finished or nothing improves; the learner then has the best measured parameters.

        Ctrl-C and SIGTERM end the step that runs, write a checkpoint and raise `KeyboardInterrupt`. Raises
        `ConfigurationError` for a checkpoint of another training, and instead of writing one with parameters that are
        not finite.
        """
        with _signals_between_steps() as was_signalled:
            return self._run(report, clock, was_signalled)

    def _run(self, report: Report, clock: Clock, was_signalled: Callable[[], bool]) -> Progress:
        plan, learner = self._plan, self._learner
        progress = self._load() or Progress()
        if progress.served_as != self._early_stopping.identity:
            progress.served, progress.best, progress.served_as = [], {}, self._early_stopping.identity
        begun = clock() - progress.seconds
        saved, recent_losses = progress.seconds, list[Tensor]()
        times, measures = StepTimes(), _Measures(self._early_stopping, clock, progress, self._done(progress))
        while (done := self._done(progress)) < 1 and not measures.must_end(progress, plan.seconds):
            for indices in self._remaining_batches(progress):
                whole = plan.seconds or progress.seconds / max(1e-9, done)
                if measures.is_due(done, whole):
                    measures.take(progress, learner.parameters, done, whole)
                    progress.seconds = clock() - begun
                    self._save(progress)
                    saved = progress.seconds
                    if measures.must_end(progress, plan.seconds):
                        break
                before = progress.seconds
                loss, positions = self._step(indices, done, progress.step)
                recent_losses.append(loss)
                progress.step += 1
                progress.batch += 1
                progress.answer_tokens += positions
                progress.seconds = clock() - begun
                times.note(progress.seconds - before)
                progress.longest_step = times.longest
                if len(recent_losses) == _LOSS_EVERY:
                    progress.losses.append((progress.step, progress.seconds, float(torch.stack(recent_losses).mean())))
                    recent_losses.clear()
                if was_signalled() or progress.seconds - saved >= plan.checkpoint_seconds:
                    self._save(progress)
                    saved = progress.seconds
                if was_signalled():
                    raise KeyboardInterrupt
                done = self._done(progress)
                report(progress, done)
                if done >= 1 or measures.must_end(progress, plan.seconds):
                    break
            else:
                progress.epoch, progress.batch = progress.epoch + 1, 0
                self._measure(progress)
        self._measure(progress)
        measures.take(progress, learner.parameters, 1.0, progress.seconds)
        self._save(progress)
        with torch.no_grad():
            for name, value in progress.best.items():
                learner.parameters[name].copy_(value)
        return progress

    def _remaining_batches(self, progress: Progress) -> Iterator[tuple[int, ...]]:
        plan = self._plan
        batches = batches_of_epoch(self._answers, progress.epoch, plan.seed, plan.batch_tokens, plan.max_length)
        return iter(batches[progress.batch :])

    def _step(self, indices: Sequence[int], done: float, number: int) -> tuple[Tensor, int]:
        """Train on one batch. Returns its loss, which a device may still compute, and its number of positions."""
        plan, learner = self._plan, self._learner
        for optimizer in learner.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(plan.learning_rate, plan.warm_up, done) * group.get("scale", 1.0)
        loss, positions = learner.loss([self._answers[index] for index in indices], number)
        descend(loss, learner.parameters.values(), learner.optimizers, plan.gradient_norm)
        return loss.detach(), positions

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

    def _load(self) -> Progress | None:
        path, learner = self._checkpoint, self._learner
        if path is None:
            return None
        return load_checkpoint(path, learner.parameters, learner.optimizers, self._fingerprint)

    def _save(self, progress: Progress) -> None:
        path, learner = self._checkpoint, self._learner
        if path is None:
            return
        if not all(bool(value.isfinite().all()) for value in learner.parameters.values()):
            raise ConfigurationError(
                f"--learning-rate: {self._plan.learning_rate:g} is refused; it must be lower: at step {progress.step}, "
                "what is trained has parameters that are not finite"
            )
        save_checkpoint(path, learner.parameters, learner.optimizers, progress, self._fingerprint)


@contextmanager
def _signals_between_steps() -> Iterator[Callable[[], bool]]:
    """Inside, the first SIGINT or SIGTERM is only noted; the next one acts at once. Yields whether there was one.

    A thread other than the main one gets no signals, so nothing is changed there.
    """
    noted = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of signal handlers
        nonlocal noted
        if noted:
            restore()
            raise KeyboardInterrupt
        noted = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield lambda: noted
    finally:
        restore()
