"""Worker servers and ranks close the engines that they own."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.verification import StepSample
from cluster.wire.peer_access import OPEN
from tests.support.fakes.echo_workers import EchoEngine, entries
from tests.support.models import drafting_modules
from workers.draft.common.modules.learned_modules import LearnedModules
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve import rank_actors
from workers.serve.learning import learner
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


async def test_a_rank_that_takes_the_place_of_another_measures_no_steps_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_actors, "set_threads", lambda _: None)
    target = {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}}
    group = RankGroup({"target": target, "log_level": "warning"}, 1, "127.0.0.1", 0)
    measured = (StepSample(1, 1, 0.5),)
    rank = rank_actors.FirstRank()

    await rank.prepare(is_packed=False, profile=measured)
    started = await rank.start(group, OPEN)

    assert started.profile == measured
    assert await rank.until_started() == started
    await rank.stop()


async def test_a_driver_rank_learns_if_the_settings_say_so_until_it_stops(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learners() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "learner"]

    monkeypatch.setattr(rank_actors, "set_threads", lambda _: None)
    drafting_modules.save(directory, tmp_path / "heads", "heads", (2,))
    target = {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}, "evidence": {"taps": (2,)}}
    heads = {"method": "heads", "placement": "target", "heads": {"path": str(tmp_path / "heads")}}
    for learn, expected in (("off", []), ("on", ["learner"])):
        rank = rank_actors.FirstRank()
        values = {"target": target, "draft": heads | {"learn": learn}, "log_level": "warning"}
        await rank.start(RankGroup(values, 1, "127.0.0.1", 0), OPEN)
        assert learners() == expected
        await rank.stop()
        assert not learners()


@pytest.mark.parametrize(
    ("patched", "value", "settings", "reason"),
    [
        (
            (LearnedModules, "bytes_each"),
            (1 << 20) + 1,
            {"learn_weight_bytes": 1 << 20},
            "learn_weight_bytes: 1048576 is too small; one client's weights take 1048577",
        ),
        ((learner, "find_spec"), lambda _: None, {}, "learn: on needs the extra distill"),
        (
            (LearnedModules, "bytes_each"),
            1,
            {"learn_directory": "/proc/none"},
            "learn_directory: /proc/none cannot be used",
        ),
    ],
    ids=["memory", "no training", "no directory"],
)
async def test_a_driver_rank_refuses_to_learn_without_what_it_needs(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patched: tuple[Any, str],
    value: Any,
    settings: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(rank_actors, "set_threads", lambda _: None)
    monkeypatch.setattr(*patched, value)
    drafting_modules.save(directory, tmp_path / "heads", "heads", (2,))
    target = {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}, "evidence": {"taps": (2,)}}
    draft = {"method": "heads", "placement": "target", "heads": {"path": str(tmp_path / "heads")}, "learn": "on"}
    rank = rank_actors.FirstRank()
    values = {"target": target, "draft": draft | settings, "log_level": "warning"}
    with pytest.raises(ConfigurationError, match=f"draft.{reason}"):
        await rank.start(RankGroup(values, 1, "127.0.0.1", 0), OPEN)
    await rank.stop()
