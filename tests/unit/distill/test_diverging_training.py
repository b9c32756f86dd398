"""A training of EAGLE-3 or DSpark that diverges ends with an error, and what was stored before stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from tests.unit.distill.training_folder import Folder
from workers.distill.device_training import DevicePlan, DeviceTraining, Measured, State
from workers.distill.peers import ALONE, Peers

REFUSED = r"--learning-rate: 1e\+30 is refused; it must be lower: at step 2, the loss is nan"


@pytest.mark.slow
def test_a_diverging_training_is_refused_its_state_stays_and_a_lower_rate_works(
    folders: Callable[[str], Folder],
) -> None:
    folder = folders("diverging")
    for _ in range(2):  # a repeated command goes on from the state before, and ends in the same way
        with pytest.raises(ConfigurationError, match=REFUSED):
            folder.train("--learning-rate", "1e30")
        (state,) = folder.path.glob("out-*/state.safetensors")
    assert folder.has_told("the training goes on from step 1") and not folder.has_told("step 2")

    weights = folder.train("--learning-rate", "1e-3")

    assert state.exists()
    assert all(bool(value.isfinite().all()) for value in weights.values())


class Breaking(DeviceTraining[nn.Linear, int, int]):
    """A training whose second step leaves a parameter that is no number. Its losses are finite."""

    def __init__(self, peers: Peers = ALONE, breaks: int = 2) -> None:
        plan = DevicePlan(steps=3, report_steps=1, learning_rate=0.5)
        super().__init__(torch.zeros(2, 2), nn.Linear(2, 1), plan, peers)
        self._breaks, self._taken = breaks, 0

    def measure(self, _: int) -> Measured:
        raise NotImplementedError

    def _batches(self, _: int) -> Iterator[tuple[int, int]]:
        yield from ((0, number) for number in range(9))

    def _losses(self, *_: int) -> tuple[Tensor, Tensor]:
        loss = self._module(torch.ones(2)).square().sum()
        return loss, loss.reshape(1)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return (torch.optim.SGD(self._module.parameters(), lr=0.0),)

    def _step(self, *arguments: Any) -> Tensor:
        found = super()._step(*arguments)
        self._taken += 1
        if self._taken == self._breaks:
            with torch.no_grad():
                self._module.weight[0, 1] = torch.inf
        return found


BROKEN = "--learning-rate: 0.5 is refused; it must be lower: at step {}, the draft has parameters that are not finite"


def test_a_finite_loss_reports_no_state_with_parameters_that_are_not_finite() -> None:
    """Else that state would be stored, and every later run would go on from it."""
    reported: list[State] = []

    with pytest.raises(ConfigurationError, match=BROKEN.format(2)):
        Breaking().run(0, reported.append, 0.0)

    assert [state.step for state in reported] == [1]


class Two(Peers):
    """Two processes, the other of which has a finite loss and a part of the draft with a broken parameter."""

    def summed(self, value: Tensor) -> Tensor:
        return value + torch.tensor([0.5, 1.0])


def test_all_processes_end_where_one_has_parameters_that_are_not_finite() -> None:
    reported: list[State] = []

    with pytest.raises(ConfigurationError, match=BROKEN.format(1)):
        Breaking(Two(0, 2), breaks=9).run(0, reported.append, 0.0)

    assert not reported
