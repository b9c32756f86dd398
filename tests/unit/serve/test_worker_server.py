"""Worker servers and replicas close the engines that they own."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster.core.config.sections import KvSection, ModelSection
from cluster.core.errors import ConfigurationError
from tests.support.fakes.echo_workers import EchoEngine, entries
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve import actors
from workers.serve.worker_server import host_target
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine


async def test_a_worker_server_closes_its_engine_once_in_the_compute_thread() -> None:
    engine = EchoEngine()
    async with host_target("127.0.0.1", engine) as host:
        assert engine.closed_by == []
    await host.stop()
    (thread,) = engine.closed_by
    assert thread.startswith("target")


async def test_an_engine_whose_server_cannot_listen_is_closed() -> None:
    engine = EchoEngine()
    with pytest.raises(ConfigurationError, match="cannot listen"):
        async with host_target("256.0.0.1", engine):
            pass
    assert len(engine.closed_by) == 1


async def test_closing_an_engine_removes_its_files(directory: Path, tmp_path: Path) -> None:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    section = KvSection(block_size=4, disk_directory=str(tmp_path))
    async with host_target("127.0.0.1", TargetEngine(model, KvPool(model.kv_spec, section, blocks=20), LocalDecider())):
        assert entries(tmp_path)
    assert not entries(tmp_path)


@pytest.mark.filterwarnings("ignore:coroutine")  # Serve awaits `__del__`; the garbage collector does not
@pytest.mark.parametrize("host", ["127.0.0.1", "256.0.0.1"], ids=["served", "not bound"])
async def test_a_replica_closes_its_engine_when_it_ends(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(actors, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(actors, "free_port", lambda _: 0)
    monkeypatch.setattr(actors, "set_threads", lambda _: None)
    kv = {"pool_bytes": 1 << 20, "disk_directory": str(tmp_path)}
    replica = actors.TargetReplica({"path": str(directory), "device": "cpu", "kv": kv}, {}, 1, host)
    with pytest.raises(ConfigurationError) if host == "256.0.0.1" else nullcontext():
        await replica.reconfigure({"log_level": "warning"})
    assert entries(tmp_path)
    await replica.__del__()
    assert not entries(tmp_path)
    del replica
    gc.collect()
