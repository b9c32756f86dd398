"""Three ranks on CPUs sum in one order: a row has the same bits alone and beside any number of others."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster.core.config.target_section import TargetSection
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import running_ranks
from tests.support.models import tiny

pytestmark = pytest.mark.slow

RANKS = 3
WIDTH, MOST_ROWS = 2881, 130
"""Numbers of a row, which three ranks do not divide, and rows: some sums are gathered whole, others in parts."""
NEIGHBORS = (1, 7, 64)


def serve_rank(rank: int, section: TargetSection, port: int, pipe: Connection) -> None:
    """Send how many sums are not in the ranks' order, and how many logits have other bits beside other rows."""
    import torch

    from workers.verify.group import join_group

    torch.set_num_threads(1)
    join_group(section, rank, "127.0.0.1", port)
    pipe.send((differing_sums(rank), differing_logits(section, rank)))
    pipe.recv()
    os._exit(0)


def differing_sums(rank: int) -> int:
    """Rows whose sum is not `(first + second) + third`, in sums of all numbers of rows."""
    import torch

    from workers.ranks import sum_over_ranks

    parts = [torch.randn(MOST_ROWS, WIDTH, generator=torch.Generator().manual_seed(one)) for one in range(RANKS)]
    expected = parts[0] + parts[1] + parts[2]
    differing = 0
    for rows in (*range(1, 12), MOST_ROWS):
        found = parts[rank][:rows].clone()
        sum_over_ranks(found)
        differing += int((found != expected[:rows]).any(dim=1).sum())
    return differing


def differing_logits(section: TargetSection, rank: int) -> int:
    """Rows of other logits, where one token of a sequence is computed beside others."""
    import torch

    from workers.forward.runner import ForwardRow, ModelRunner
    from workers.kv.pool import KvPool
    from workers.model.loading import load_model

    model = load_model(section, rank=rank, tensor_parallel=RANKS)
    pool = KvPool(model.kv_spec, section.kv.model_copy(update={"block_size": 4}), 2000)
    runner = ModelRunner(model, pool)

    def logits(count: int) -> torch.Tensor:
        tables = [pool.new_table() for _ in range(count)]
        rows = [
            ForwardRow(table, tuple((5 * index + token) % 90 for token in range(9)), select=(8,))
            for index, table in enumerate(tables)
        ]
        for row in rows:
            pool.reserve(row.table, row.end)
        found = runner.forward(rows).clone()
        for table in tables:
            pool.release(table)
        return found

    alone = logits(1)[0]
    return sum(not torch.equal(logits(1 + count)[0], alone) for count in NEIGHBORS)


@pytest.mark.parametrize("family", ["llama", "whole experts"])
def test_a_row_has_the_same_bits_alone_and_beside_others(family: str, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 192}
    config = tiny.llama(**shape) if family == "llama" else tiny.mixtral(**shape, num_local_experts=6)
    section = TargetSection(
        path=str(tiny.save(tmp_path, config)),
        device="cpu",
        compile="off",
        compile_directory=str(KEPT),
        tensor_parallel=RANKS,
        enable_expert_parallel=family == "whole experts",
    )
    with running_ranks(RANKS, serve_rank, section) as ranks:
        assert ranks.answers() == [(0, 0)] * RANKS
