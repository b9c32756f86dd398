"""When one rank fails as a target starts, whatever it does alone, no other rank waits for it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import start_ranks
from tests.support.models import tiny
from workers.serve.configuration import load_configuration
from workers.serve.node import free_port
from workers.serve.rank_placement import RankGroup

pytestmark = pytest.mark.slow

RANKS = 2
SECONDS = 240.0
REASON = "planted"


def fail(*_: object, **__: object) -> Any:
    raise ConfigurationError(REASON)


FAULTS: Mapping[str, tuple[int, str]] = {
    "what the first rank drafts with": (0, "workers.serve.rank_actors.create"),
    "the fusion of taps, which the first rank alone loads": (0, "workers.verify.build.load_fusion"),
    "the weights of the first rank": (0, "workers.model.loading._read"),
    "the weights of the second rank": (1, "workers.model.loading._read"),
    "the kernels of the first rank": (0, "workers.model.loading.replace_linear_layers"),
    "the pool of the second rank": (1, "workers.verify.build.blocks_that_fit"),
    "the acceptance rule of the second rank": (1, "workers.verify.build.create_rule"),
}
"""What fails: the rank, and the function that raises on it."""


def configure(directory: Path) -> Configuration:
    target: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile": "off", "tensor_parallel": RANKS}
    target |= {"compile_directory": str(KEPT), "kv": {"block_size": 4, "pool_bytes": 1 << 20}}
    target["evidence"] = {"taps": [0, -1], "is_sent": True, "fusion": str(directory)}
    return load_configuration({"target": target, "draft": {"methods": ["ngram"], "placement": "target"}})


def start_rank(rank: int, directory: Path, ports: list[int]) -> None:
    """Start one rank of a target after the other, as its actor does, and write the error that each of them raises."""
    from unittest.mock import patch

    from workers.serve.rank_actors import FirstRank, WorkerRank
    from workers.verify.group import leave_group

    found = {}
    for (name, (failing, function)), port in zip(FAULTS.items(), ports, strict=True):
        group = RankGroup(configure(directory).model_dump(mode="json"), 1, "127.0.0.1", port)
        with patch("workers.verify.build.load_fusion"), patch(function, fail) if rank == failing else nullcontext():
            try:
                if rank == 0:
                    FirstRank()._load(configure(directory), group)
                else:
                    WorkerRank().run(group, rank)
            except Exception as error:
                found[name] = type(error).__name__, str(error)
            finally:
                leave_group()
    (directory / f"rank-{rank}.json").write_text(json.dumps(found), "utf-8")
    os._exit(0)


def test_all_ranks_fail_together_and_one_says_why(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama(num_attention_heads=4, num_key_value_heads=2))
    processes = start_ranks(start_rank, [(directory, [free_port("127.0.0.1") for _ in FAULTS])] * RANKS)
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    found = [json.loads((directory / f"rank-{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    for name, (failing, _) in FAULTS.items():
        assert found[failing][name] == ["ConfigurationError", REASON], name
        assert found[1 - failing][name] == ["AnotherRankFailed", "another rank has failed"], name
