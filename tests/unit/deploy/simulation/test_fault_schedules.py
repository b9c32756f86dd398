"""Fault schedules in virtual time: every stream is the reference, nothing is held in the end, every run repeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deploy.simulation.faults.campaign import CampaignResult, run_all
from deploy.simulation.faults.run import run_schedule
from deploy.simulation.faults.schedule import derive

pytestmark = pytest.mark.slow

SCHEDULES = 60


@pytest.fixture(scope="module")
def campaign() -> CampaignResult:
    return run_all(0, SCHEDULES, 1)


def test_no_schedule_breaks_an_invariant(campaign: CampaignResult) -> None:
    assert campaign.failed == {}
    assert campaign.schedules == SCHEDULES


def test_the_schedules_kill_freeze_and_disturb_every_role(campaign: CampaignResult) -> None:
    roles = {"target", "draft", "coordinator", "ingress"}
    assert set(campaign.kills) == roles
    assert set(campaign.freezes) == roles
    assert all(campaign.messages[fault] for fault in ("lost", "delayed", "duplicated", "reordered"))


def test_answers_are_complete_and_have_accepted_drafts(campaign: CampaignResult) -> None:
    assert campaign.complete > campaign.clients / 2
    assert campaign.tokens > campaign.accepted > campaign.tokens / 20


def test_a_schedule_runs_the_same_in_every_process() -> None:
    command = [sys.executable, "-m", "deploy.cli", "simulate", "faults", "--schedules", "6", "--seed", "40", "--lines"]
    outputs = [
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0].splitlines()[0])["seed"] == 40


def test_a_replay_traces_the_faults() -> None:
    seed = next(seed for seed in range(SCHEDULES) if any(event.kind == "kill" for event in derive(seed).events))
    traced: list[str] = []
    run = run_schedule(seed, traced.append)
    assert run.violations == []
    for event in derive(seed).events:
        assert any(f"{event.kind} {event.role}-{event.index} for" in line for line in traced)
        assert any(f"{event.role}-{event.index} is repaired after {event.kind}" in line for line in traced)
