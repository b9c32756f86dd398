"""Fixtures that several suites share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster.core.config import Configuration
from deploy.settings import load_settings
from tests.support.serve_process import ServeProcess

Deploy = Callable[[Configuration], ServeProcess]


@pytest.fixture(scope="session")
def deploy() -> Iterator[Deploy]:
    """Runs a configuration under Ray Serve. Ray starts once; another configuration replaces the one that runs."""
    running: Configuration | None = None
    with ServeProcess(load_settings().cache_directory) as process:  # compiled kernels are found there

        def run(configuration: Configuration) -> ServeProcess:
            nonlocal running
            if running is None:
                process.start(configuration)
            elif running != configuration:
                process.redeploy(configuration)
            running = configuration
            return process

        yield run
