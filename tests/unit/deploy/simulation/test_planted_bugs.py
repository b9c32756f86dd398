"""Bugs planted into the control plane are found by simulated fault schedules."""

from __future__ import annotations

import re

import pytest

from deploy.simulation.faults.run import run_schedule
from tests.unit.deploy.simulation.planted_bugs import PLANTED

pytestmark = pytest.mark.slow

SCHEDULES = 1000


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_within_a_thousand_schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, pattern = PLANTED[name]
    plant(monkeypatch)
    found = next(run for seed in range(SCHEDULES) if (run := run_schedule(seed)).violations)
    print(f"{name}: seed {found.seed}: {found.violations[0]}")
    assert re.search(pattern, found.violations[0])
    monkeypatch.undo()
    assert run_schedule(found.seed).violations == []
