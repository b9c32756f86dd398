"""Ranks that hold whole experts of a mixture write the texts of one rank, and read their own experts alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget
from tests.support.engines.colocated_decoding import decode_together, plain_answers, through_trees
from tests.support.engines.rank_group import REQUESTS, RankGroup, configure_ranks, rank_group
from tests.support.engines.rank_processes import start_ranks
from tests.support.models import tiny
from tests.zoo.configs import tiny_config
from workers.model.loading import load_model
from workers.serve.node import free_port
from workers.verify.build import build_engine
from workers.verify.group import join_group, leave_group

pytestmark = pytest.mark.slow

RANKS = 2
COUNT = 12
CHAINS = DraftBudget(3, 3)
SECONDS = 300.0
FAMILIES: Mapping[str, PreTrainedConfig] = {
    "mixtral": tiny.mixtral(num_key_value_heads=2),
    "qwen3_moe": tiny.qwen3_moe(num_key_value_heads=2),
    "gpt_oss": tiny.gpt_oss(num_key_value_heads=2),
    "deepseek_v3": tiny_config("deepseek_v3"),
    "glm4_moe": tiny_config("glm4_moe"),
}


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with rank_group(RANKS) as group:
        yield group


def configure(directory: Path, layers: int, ranks: int = RANKS) -> Configuration:
    return configure_ranks(directory, ranks, layers=layers, enable_expert_parallel=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_texts_are_those_of_one_rank_in_chains_and_trees(group: RankGroup, name: str, tmp_path: Path) -> None:
    config = FAMILIES[name]
    directory = tiny.shift(tiny.save(tmp_path, config))
    expected = plain_answers(build_engine(configure(directory, 2, ranks=1).target).step, REQUESTS, COUNT)
    formed = group.form(configure(directory, config.num_hidden_layers))
    chains = decode_together(formed.step, REQUESTS, COUNT, CHAINS)
    assert {one: decoded.answer[:COUNT] for one, decoded in chains.items()} == expected
    assert all(decoded.accepted for decoded in chains.values())
    formed.release_all()
    for one, (answer, accepted) in through_trees(formed.step, REQUESTS, expected).items():
        assert answer[:COUNT] == expected[one]
        assert accepted >= COUNT // 2
    formed.release_all()
    for one, request in REQUESTS.items():
        assert plain_answers(formed.step, {one: request}, COUNT)[one] == expected[one]


def read_own_experts(rank: int, directory: Path, port: int) -> None:
    """Load one rank, and write how many experts it read and how many it passed over."""
    counts = {"read": 0, "passed over": 0}
    shard = DtensorShardOperation.shard_tensor

    def counted(operation: Any, source: Any, tensor_idx: int | None = None, **others: Any) -> Any:
        part = shard(operation, source, tensor_idx=tensor_idx, **others)
        if tensor_idx is not None:
            counts["passed over" if part is None else "read"] += 1
        return part

    DtensorShardOperation.shard_tensor = counted  # type: ignore[assignment, method-assign]
    section = configure(directory, 2).target
    join_group(section, rank, "127.0.0.1", port)
    load_model(section, rank=rank, tensor_parallel=RANKS)
    (directory / f"rank-{rank}.json").write_text(json.dumps(counts), "utf-8")
    leave_group()
    os._exit(0)


def test_each_rank_reads_its_own_experts_alone(tmp_path: Path) -> None:
    directory, port = tiny.save(tmp_path, tiny.mixtral(num_key_value_heads=2)), free_port("127.0.0.1")
    for process in start_ranks(read_own_experts, [(directory, port)] * RANKS):
        process.join(SECONDS)
        assert process.exitcode == 0
    for rank in range(RANKS):
        counts = json.loads((directory / f"rank-{rank}.json").read_text("utf-8"))
        assert counts == {"read": 2 * 4 * 3, "passed over": 2 * 4 * 3}  # layers, experts, matrices
