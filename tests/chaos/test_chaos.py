"""Processes of every role are killed and frozen while clients stream. No token changes, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import ChaosOptions, run_chaos
from tests.chaos.report import ChaosReport

pytestmark = pytest.mark.slow


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path


async def chaos(options: ChaosOptions, logs: Path) -> ChaosReport:
    report = await run_chaos(options, logs)
    assert report.is_clean, report.to_text()
    assert report.streams.complete and report.streams.tokens
    return report


async def test_killed_and_frozen_processes_change_no_token_and_leave_nothing_behind(logs: Path) -> None:
    options = ChaosOptions(rounds=5, pause_seconds=0.2, at_once=8, distinct=12, seed=3)
    report = await chaos(options, logs)
    assert report.kills > 2
    assert len(report.replaced) > 1, "few roles were killed"


async def test_killed_and_frozen_processes_change_no_token_of_weights_that_stay_as_they_are_stored(logs: Path) -> None:
    settings = {"target.quantization": "stored"}
    options = ChaosOptions(rounds=4, pause_seconds=0.2, at_once=8, distinct=8, seed=5, settings=settings)
    report = await chaos(options, logs)
    assert report.kills > 1


async def test_killed_ranks_of_a_gguf_file_change_no_token(logs: Path) -> None:
    options = ChaosOptions(
        ranks=(1, 3),
        rounds=4,
        pause_seconds=0.2,
        at_once=8,
        distinct=8,
        seed=5,
        roles=("target", "rank"),
        stored="gguf",
        settings={"target.quantization": "stored"},
    )
    report = await chaos(options, logs)
    assert report.kills > 1
