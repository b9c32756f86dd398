"""How many blocks a pool has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.core.config.target_section import KvSection
from workers.kv import pool
from workers.kv.pool import blocks_that_fit
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
