"""A training in one process keeps the state that drafts held-back texts best."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deploy.distillation.checkpoints import NO_CHECKPOINTS
from deploy.distillation.single_process import SingleProcess, Texts
from deploy.distillation.training_card import TrainingCard
from workers.distill.device_training import Measured, State
from workers.distill.peers import ALONE
from workers.model.public_shapes import FeatureShape


class Scripted:
    """A training that reports some states, and whose measures are given."""

    def __init__(self, found: Sequence[float], states: int) -> None:
        self._found, self._states = iter(found), states
        self.step = -1

    def measure(self, texts: object) -> Measured:
        return Measured((), next(self._found))

    def run(self, texts: object, report: Callable[[State], None], report_seconds: float, *, resumed: object) -> None:
        for step in range(self._states):
            self.step = step
            report(State(step, 1.0, 0.5, None, 0))


class Process(SingleProcess):
    """A process without a target."""

    def __init__(self) -> None:
        self.options = argparse.Namespace(report_seconds=1.0, out=Path("out"))
        self.checkpoints, self.peers, self.device = NO_CHECKPOINTS, ALONE, torch.device("cpu")
        self.directory_of_training = None
        self._told, self._began = lambda _: None, time.monotonic()
        self.card = TrainingCard("tiny", "pilotfish distill", torch.device("cpu"), "")

    def default_taps(self) -> tuple[int, ...]:
        return ()

    def first_layers(self) -> tuple[int, ...]:
        return ()

    def shape(self) -> FeatureShape:
        raise NotImplementedError

    def train(self, texts: Texts) -> None:
        """Do nothing."""


def saved(found: Sequence[float], measured: dict[str, Any], states: int = 5) -> list[int]:
    """The steps whose states are saved."""
    training: Any = Scripted(found, states)
    steps: list[int] = []
    Process().fit(training, None, measured, lambda: steps.append(training.step))
    return steps


def test_a_state_that_drafts_held_back_texts_worse_is_not_saved() -> None:
    assert saved([2.5, 3.8, 3.6, 3.8, 3.7], {"held out": ()}) == [0, 1, 3]


def test_the_first_texts_decide() -> None:
    assert saved([2.5, 9.0, 3.8, 1.0], {"held out": (), "spec_bench": ()}, states=2) == [0, 1]


def test_without_texts_to_measure_on_the_latest_state_is_saved() -> None:
    assert saved([], {}, states=3) == [0, 1, 2]


def test_a_training_without_a_report_is_saved_at_its_end() -> None:
    assert saved([], {}, states=0) == [-1]
