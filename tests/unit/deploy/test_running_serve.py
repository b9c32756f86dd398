"""Waiting for an application: why a start failed is said, also while Serve repeats it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from ray.serve import Application
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from cluster.core.config.server import ServerSection
from cluster.core.errors import WorkerUnavailable
from deploy.ray import running_serve
from deploy.ray.running_serve import run_application

LATER = "A replica failed to start with exception. Retrying 2 more time(s). Error:\nTraceback\nRuntimeError: no memory"
NEVER = "The deployment failed to start 3 times in a row. Error:\nTraceback\na.b.Error: no file"


def overview(status: str, deployment: str, message: str = "") -> ApplicationStatusOverview:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    target = DeploymentStatusOverview(DeploymentStatus(deployment), trigger, {}, message)
    return ApplicationStatusOverview(ApplicationStatus(status), "", 0.0, {"Target": target})


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[ApplicationStatusOverview]:
    """What Serve answers, one after another; the last one again and again."""
    found: list[ApplicationStatusOverview] = []

    def answers() -> Iterator[ApplicationStatusOverview]:
        yield from found
        while True:
            yield found[-1]

    each = answers()
    fake = SimpleNamespace(
        start=lambda **_: None,
        RunTarget=lambda *_, **__: None,
        run_many=lambda *_, **__: None,
        status=lambda: SimpleNamespace(applications={"pilotfish": next(each)}),
    )
    monkeypatch.setattr(running_serve, "serve", fake)
    monkeypatch.setattr(running_serve, "_POLL_SECONDS", 0.0)
    return found


def run(seconds: float = 60.0) -> None:
    run_application(cast(Application, None), ServerSection(), lambda _: None, time.monotonic() + seconds)


def test_a_failed_start_that_is_repeated_is_logged_once(
    statuses: list[ApplicationStatusOverview], caplog: pytest.LogCaptureFixture
) -> None:
    failed = overview("DEPLOYING", "UPDATING", LATER)
    statuses += [overview("DEPLOYING", "UPDATING"), failed, failed, overview("RUNNING", "HEALTHY")]
    with caplog.at_level(logging.WARNING):
        run()
    assert [record.message for record in caplog.records] == ["a replica of the target did not start: no memory"]


def test_after_the_last_failed_start_the_reason_is_raised(statuses: list[ApplicationStatusOverview]) -> None:
    statuses += [overview("DEPLOYING", "UPDATING", LATER), overview("DEPLOY_FAILED", "DEPLOY_FAILED", NEVER)]
    with pytest.raises(WorkerUnavailable, match=r"^target did not start: no file$"):
        run()


def test_at_the_deadline_the_reason_of_the_last_failed_start_is_raised(
    statuses: list[ApplicationStatusOverview],
) -> None:
    statuses.append(overview("DEPLOYING", "UPDATING", LATER))
    with pytest.raises(WorkerUnavailable, match=r"not ready after .* s \(target did not start: no memory\); raise"):
        run(seconds=-1.0)
