"""How many blocks a pool has, and what it loads from a disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core.config.target_section import KvSection
from workers.kv import pool
from workers.kv.pool import KvPool, blocks_that_fit
from workers.kv.spec import KvCacheSpec, LayerShape

SPEC = KvCacheSpec((LayerShape(2, 8),), 64, torch.float32, torch.device("cpu"))
BLOCK_BYTES = 2 * 2 * 8 * 4 * 16


def test_a_pool_takes_its_share_of_the_free_memory_that_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_free_bytes", lambda _: 1000 * BLOCK_BYTES)
    section = KvSection(block_size=16, memory_fraction=0.5)
    assert blocks_that_fit(SPEC, section) == 500
    assert blocks_that_fit(replace(SPEC, reserved_bytes=400 * BLOCK_BYTES), section) == 300
    given = section.model_copy(update={"pool_bytes": 900 * BLOCK_BYTES})
    assert blocks_that_fit(replace(SPEC, reserved_bytes=400 * BLOCK_BYTES), given) == 900


def test_ranks_keep_the_length_that_they_agreed_on_though_a_disk_drops_a_block_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a sequence were shorter on one rank than on the others, they would wait for each other."""
    block_bytes, text = BLOCK_BYTES // 4, list(range(16))
    section = KvSection(block_size=4, disk_directory=str(tmp_path), disk_bytes=4 * (block_bytes + 200))
    opened, said = KvPool(SPEC, section, 4), list[int]()
    tiers = opened.tiers
    assert tiers is not None

    def agree(number: int, ranks: int) -> int:
        if not said:  # the disk has room for four blocks
            tiers.save(b"another", [torch.zeros(block_bytes, dtype=torch.uint8)])
            tiers.flush()
        said.append(number)
        return number

    monkeypatch.setattr(pool, "least_of_all_ranks", agree)
    for tokens in (text, []):  # the second sequence takes the blocks of the first
        table = opened.new_table()
        opened.reserve(table, 16)
        opened.commit(table, tokens)
        opened.release(table)
    tiers.flush()
    assert opened.open([*text, 16]).stored_len == 0
    assert (said, opened.blocks_free) == ([16, 0], 4)
    opened.close()
