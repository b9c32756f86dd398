"""Fits a draft to texts: it reports, keeps the best draft, and goes on where an earlier run left the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from deploy.distillation.checkpoints import Checkpoints
from deploy.distillation.training_card import TrainingCard
from deploy.distillation.training_directory import TrainingDirectory
from workers.distill.device_training import DeviceTraining, Resumed, State
from workers.distill.peers import Peers

States = TypeVar("States")
"""Texts with the hidden states that a training reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a training keeps its draft and its state, and who takes part in it."""

    out: Path
    """The directory of the draft."""
    card: TrainingCard
    tell: Callable[[str], None]
    """Tells a line of the progress, which the card gets, too."""
    peers: Peers
    checkpoints: Checkpoints
    directory: TrainingDirectory | None
    """Where a repeated command finds what it goes on with; `None`: it starts anew."""

    @property
    def written(self) -> TrainingDirectory | None:
        """The directory of the training, for the process that writes to it: the first one."""
        return None if self.peers.rank else self.directory


class Fitting(Generic[States]):
    """A training, and what it is measured on."""

    def __init__(
        self,
        training: DeviceTraining[Any, States, Any],
        measured: Mapping[str, States],
        save: Callable[[], None],
        place: Place,
    ) -> None:
        """`save` writes the draft. The first of the `measured` texts decide which state is the best one."""
        self._training, self._measured, self._save, self._place = training, measured, save, place
        self._best = -math.inf if place.directory is None else place.directory.best()

    def run(self, texts: States, report_seconds: float) -> None:
        """Train, and save what is measured to draft no worse than every state before.

        Without texts to measure on, the latest state is saved. Raises `PilotfishError`.
        """
        place = self._place
        begun = place.checkpoints.load(self._training)
        if begun.step:
            record = None if place.directory is None else place.directory.noted()
            if record is not None:
                place.card.go_on(record, begun.step)
            place.tell(f"the training goes on from step {begun.step}")
        if place.written is not None:
            place.written.restore(place.out)
        self._training.run(texts, self._report, report_seconds, resumed=begun)
        if self._best == -math.inf:
            self._save_best()
        if place.peers.rank:
            return
        if place.card.introduction:  # what was told after the best state belongs to the card, too
            place.card.rewrite(place.out)
        if place.written is not None:
            place.written.keep(place.out, self._best)
            place.written.finish()

    def _save_best(self) -> None:
        self._save()
        if self._place.written is not None:
            self._place.written.keep(self._place.out, self._best)

    def _report(self, state: State) -> None:
        place = self._place
        found = {name: self._training.measure(each) for name, each in self._measured.items()}
        own = next((one.tokens_per_step for one in found.values()), math.inf)
        place.card.add(state, own)
        place.tell(f"training {state}; {'; '.join(f'{name} {one}' for name, one in found.items())}")
        # Processes agree, though their measures may differ in the last bit.
        reached = float(place.peers.summed(torch.tensor(own, device=place.card.device))) / place.peers.count
        if reached >= self._best:
            self._best = reached
            self._save_best()
        if place.written is not None:
            place.written.note(place.card.record())
        place.checkpoints.save(self._training, Resumed(state.step, state.seconds))
