"""Fixtures of the tests that start whole clusters. They import torch and Ray only when a test uses them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.engines.kept_kernels import kept_kernels

if TYPE_CHECKING:
    from cluster.core.config.sections import Configuration
    from tests.support.clusters.live_cluster import Reference
    from tests.support.clusters.serve_process import Deploy, ServeProcess


# The modules that collecting imports make a million objects, all of which live until the end. Looking for garbage among
# them takes a third of the time of collecting, and half a second whenever a test asks for it.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> Iterator[None]:
    """All tests share the compiled CPU kernels."""
    with kept_kernels():
        yield


@pytest.fixture(scope="session")
def target_directory() -> Path:
    """SmolLM2-135M-Instruct, de-quantized. `make test-all` prepares it first, otherwise this does."""
    from cluster.core.errors import ModelLoadError
    from deploy.settings import load_settings
    from workers.model.model_files import resolve_model_directory

    try:
        return resolve_model_directory("smollm2-135m-instruct", load_settings().cache_directory)
    except ModelLoadError as error:
        pytest.fail(f"run `make setup` first: {error}")


@pytest.fixture(scope="session", params=["opus-mt-fr-en", "opus-mt-en-fr"])
def translator_directory(request: pytest.FixtureRequest) -> Path:
    """A translation model, as `make translators` prepared it."""
    from deploy.settings import load_settings

    directory = load_settings().cache_directory / str(request.param)
    if not (directory / "config.json").is_file():
        pytest.skip(f"{request.param} is not in the cache: `make translators` fetches 660 MB")
    return directory


@pytest.fixture(scope="session")
def draft_directory(target_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights with noise: its drafts are often accepted and often rejected."""
    from tests.support.models import tiny

    return tiny.blur(target_directory, tmp_path_factory.mktemp("draft"), noise=0.08)


@pytest.fixture(scope="session")
def reference(target_directory: Path) -> Reference:
    """The target's model under `transformers`."""
    import torch

    from tests.support.clusters.live_cluster import Reference

    torch.set_num_threads(2)
    return Reference(target_directory)


@pytest.fixture(scope="session")
def deploy() -> Iterator[Deploy]:
    """Runs a configuration under Ray Serve. Ray starts once; another configuration replaces the one that runs."""
    from deploy.settings import load_settings
    from tests.support.clusters.serve_process import ServeProcess

    running: Configuration | None = None
    with ServeProcess(load_settings().cache_directory) as process:  # compiled kernels are found there

        def run(configuration: Configuration) -> ServeProcess:
            nonlocal running
            if process.configuration is None:
                process.start(configuration)
            elif running != configuration:
                process.redeploy(configuration)
            running = configuration
            return process

        yield run
