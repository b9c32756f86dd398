"""Processes of every role are killed and frozen while clients stream. No token changes, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import ChaosOptions, run_chaos
from tests.chaos.report import ChaosReport


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path


async def chaos(options: ChaosOptions, logs: Path) -> ChaosReport:
    report = await run_chaos(options, logs)
    assert report.is_clean, report.to_text()
    assert report.streams and report.tokens
    return report


async def test_killed_and_frozen_workers_change_no_token_and_leave_nothing_behind(logs: Path) -> None:
    options = ChaosOptions(rounds=10, at_once=8, distinct=16, seed=3, roles=("target", "rank", "draft"))
    report = await chaos(options, logs)
    assert report.kills > 5
    assert report.replaced["target"] and report.replaced["draft"]
