"""What `pilotfish serve` asks of its own HTTP API before it says that it is ready, and whom it stops."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.ingress.http import create_app
from deploy.ray import serve_cluster
from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import load_settings
from tests.support.fakes.fake_engine import MODEL, listening
from tests.support.fakes.http_app import HttpApi

SECONDS = 20.0
"""Longest time until the API is ready, on a busy machine."""


def cluster_at(host: str, port: str = "8000") -> ServeCluster:
    """A cluster whose HTTP API has an address. It is not started."""
    assignments = [f"server.http_host={host}", f"server.http_port={port}", f"server.grpc_host={host}"]
    return ServeCluster(load_settings(None, assignments, {}), lambda _: None)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("has_proxy", [False, True])
async def test_the_own_api_answers_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, has_proxy: bool
) -> None:
    """Also where it listens on all addresses, as in the image, and where the environment names a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv(name, "http://127.0.0.1:1" if has_proxy else "")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    api = HttpApi(tmp_path / "model")
    async with api.http, listening(create_app(api.client, LimitsSection())) as url:
        cluster = cluster_at(host, url.rpartition(":")[2])
        deadline = time.monotonic() + SECONDS
        await asyncio.to_thread(cluster._wait_until_ready, deadline)
        await asyncio.to_thread(cluster._warm_up, MODEL, deadline)
    assert len(api.engine.requests) == 1
    assert cluster.is_lossless


def test_clients_of_this_machine_are_told_addresses_that_they_reach() -> None:
    assert cluster_at("0.0.0.0").http_url == "http://127.0.0.1:8000"
    assert cluster_at("0.0.0.0").grpc_address == "127.0.0.1:9000"
    assert cluster_at("192.0.2.7").grpc_address == "192.0.2.7:9000"


@pytest.mark.parametrize("is_deployed", [False, True])
def test_stopping_at_once_ends_the_own_application_alone(monkeypatch: pytest.MonkeyPatch, is_deployed: bool) -> None:
    """Before it is deployed, an application of its name in a joined Ray cluster belongs to others."""
    drained: list[str] = []
    deleted: list[str] = []
    monkeypatch.setattr("ray.serve.delete", lambda name, **_: deleted.append(name))
    monkeypatch.setattr(serve_cluster, "drain", lambda name, _: drained.append(name))
    monkeypatch.setattr(serve_cluster.ray, "is_initialized", lambda: True)
    settings = load_settings(None, (), {"PILOTFISH_RAY_ADDRESS": "127.0.0.1:1"})
    cluster = ServeCluster(settings, lambda _: None)
    cluster._is_deployed = is_deployed
    cluster.stop_at_once()
    expected = ["pilotfish"] if is_deployed else []
    assert (drained, deleted) == (expected, expected)


def test_a_process_of_ray_that_has_ended_is_a_loss() -> None:
    cluster = cluster_at("127.0.0.1")
    assert cluster.find_loss() is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        cluster._ray_processes = (psutil.Process(process.pid),)
        assert cluster.find_loss() is None
        process.kill()
        until = time.monotonic() + SECONDS
        while (lost := cluster.find_loss()) is None and time.monotonic() < until:  # nobody has waited for it
            time.sleep(0.01)
        assert lost is not None and f"its process {process.pid} is gone" in lost
    assert cluster.find_loss() == lost
