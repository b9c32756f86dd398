"""Worker servers and ranks close the engines that they own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.wire.peer_access import OPEN
from tests.support.fakes.echo_workers import EchoEngine, entries
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve import rank_actors
from workers.serve.rank_placement import RankGroup
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


@pytest.mark.parametrize("host", ["127.0.0.1", "256.0.0.1"], ids=["served", "not bound"])
async def test_a_driver_rank_closes_its_engine_when_it_stops(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(rank_actors, "set_threads", lambda _: None)
    kv = {"pool_bytes": 1 << 20, "disk_directory": str(tmp_path)}
    values = {"target": {"path": str(directory), "device": "cpu", "kv": kv}, "log_level": "warning"}
    rank = rank_actors.FirstRank()
    with pytest.raises(ConfigurationError) if host == "256.0.0.1" else nullcontext():
        await rank.start(RankGroup(values, 1, host, 0), OPEN)
    assert entries(tmp_path)
    await rank.stop()
    assert not entries(tmp_path)
