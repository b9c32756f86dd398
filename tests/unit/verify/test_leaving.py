"""A rank that computes no more leaves its group if nothing there can make it wait."""

from __future__ import annotations

import pytest
from torch import distributed

from tests.support.engines.one_rank import group_of_one
from workers.serve import rank_actors
from workers.serve.rank_actors import WorkerRank
from workers.serve.rank_placement import RankGroup
from workers.verify import group


@pytest.mark.parametrize("backends", ["gloo", "cpu:gloo,cuda:nccl"])
def test_a_rank_leaves_a_group_of_cpus_alone(backends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for a lost rank and for the CUDA graphs of the engine, and the error would not be raised."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(distributed, "get_backend_config", lambda: backends)
    monkeypatch.setattr(group, "join_group", lambda *_: None)
    monkeypatch.setattr(rank_actors, "create_for_worker_rank", fail)
    for name in ("set_logging", "compute_without_interruption", "set_threads", "use_interface_of"):
        monkeypatch.setattr(rank_actors, name, lambda *_: None)
    with group_of_one("cpu"):
        with pytest.raises(RuntimeError, match="planted"):
            WorkerRank().run(RankGroup({}, 1, "127.0.0.1", 0), 1)
        assert distributed.is_initialized() == ("nccl" in backends)
