"""A pool's memory is provided ahead of its use, and its contents stay."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
import threading
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from cluster.core.config.target_section import KvSection
from workers.kv.pool import KvPool
from workers.kv.spec import KvCacheSpec, LayerShape
from workers.kv.start_memory import populate, release_start_memory

LINUX = tuple(int(part) for part in platform.release().split(".")[:2]) if sys.platform == "linux" else (0, 0)
pytestmark = pytest.mark.skipif(LINUX < (5, 14), reason="only Linux from 5.14 on provides memory ahead")

BYTES = 64 << 20


def test_all_pages_are_in_memory_and_keep_their_contents() -> None:
    pool = new_pool()
    pool.keys[1][3] = 1.5
    release_start_memory()  # only the first call in a process frees memory
    before = psutil.Process().memory_info().rss
    populate(pool).join()
    assert psutil.Process().memory_info().rss - before > BYTES * 3 // 4
    assert bool((pool.keys[1][3] == 1.5).all())
    assert sum(int(tensor.count_nonzero()) for tensor in (*pool.keys, *pool.values)) == pool.keys[1][3].numel()


def test_a_pool_can_be_freed_before_all_its_pages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, calls = threading.Event(), threading.Event(), 0

    def advise(address: object, size: object, advice: int) -> int:
        nonlocal calls
        calls += 1
        began.set()
        goes_on.wait(30)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=advise))
    pool = new_pool()
    thread, reference = populate(pool), weakref.ref(pool)
    assert began.wait(30)
    del pool
    gc.collect()
    assert reference() is None
    goes_on.set()
    thread.join()
    assert calls == 1


def new_pool() -> KvPool:
    layers = (LayerShape(2, 8), LayerShape(2, 8))
    spec = KvCacheSpec(layers, max_context_len=1000, dtype=torch.float32, device=torch.device("cpu"))
    return KvPool(spec, KvSection(block_size=16, pool_bytes=BYTES))
