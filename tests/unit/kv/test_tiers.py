"""The offload tiers store blocks that the pool evicts, and load them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.core.config.base import MIB
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from tests.support.engines.kv_tiers import BLOCK_BYTES, CPU, block, empty, held, holds, key, save, tiers_of
from workers.kv.tiers import Tiers

WITHOUT_CUDA = not torch.cuda.is_available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")]),
]


@pytest.fixture
def host() -> Iterator[Tiers]:
    """Tiers with room for three blocks in host memory."""
    with tiers_of(3) as tiers:
        yield tiers


def test_a_block_is_loaded_bit_by_bit(host: Tiers) -> None:
    assert not holds(host, 1)
    save(host, 1)
    assert holds(host, 1)
    assert holds(host, 1), "a loaded block stays in its tier"
    assert (host.host.saved, host.host.loaded, host.host.dropped) == (1, 2, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_saved_blocks_can_be_loaded_though_the_pool_is_overwritten_at_once(device: str, tmp_path: Path) -> None:
    section = KvSection(host_bytes=2 * BLOCK_BYTES, disk_directory=str(tmp_path), disk_bytes=MIB)
    pool = [part.to(device) for part in block(0)]
    with Tiers(section, BLOCK_BYTES, torch.device(device)) as tiers:
        for number in range(8):
            for part, content in zip(pool, block(number), strict=True):
                part.copy_(content)
            tiers.save(key(number), pool)
            for part in pool:
                part.zero_()
        for number in reversed(range(8)):
            assert tiers.load(key(number), pool)
            for part, content in zip(pool, block(number), strict=True):
                assert torch.equal(part.cpu().view(torch.int16), content.view(torch.int16))
        assert tiers.worth_loading([key(7)], 1 << 20)


def test_parts_may_differ_in_shape_and_need_not_be_adjacent() -> None:
    pool = torch.arange(64, dtype=torch.float32).view(2, 4, 8)
    parts = [pool[1, :2], pool[0, 3:]]
    with Tiers(KvSection(host_bytes=MIB), 24 * 4, CPU) as tiers:
        tiers.save(key(1), parts)
        kept = [part.clone() for part in parts]
        pool.zero_()
        assert tiers.load(key(1), parts)
    assert all(torch.equal(part, copy) for part, copy in zip(parts, kept, strict=True))


def test_the_least_recently_used_block_is_evicted_first(host: Tiers) -> None:
    save(host, 1, 2, 3)
    assert holds(host, 1)
    save(host, 2)  # already stored: nothing is copied, but it counts as used
    save(host, 4, 5)
    assert held(host, range(10)) == [2, 4, 5]
    assert (host.host.saved, host.host.dropped) == (5, 2)


def test_finding_a_block_does_not_count_as_using_it(host: Tiers) -> None:
    save(host, 1, 2, 3)
    assert host.find(key(1))
    save(host, 4)
    assert not host.find(key(1))


def test_touched_blocks_are_evicted_last(host: Tiers) -> None:
    save(host, 1, 2, 3)
    host.touch([key(1), key(9)])
    save(host, 4, 5)
    assert held(host, range(10)) == [1, 4, 5]


@pytest.mark.parametrize("host_bytes", [0, BLOCK_BYTES - 1])
def test_without_room_for_a_block_nothing_is_stored(host_bytes: int) -> None:
    with Tiers(KvSection(host_bytes=host_bytes), BLOCK_BYTES, CPU) as tiers:
        save(tiers, 1)
        assert not holds(tiers, 1)


def test_content_of_another_size_is_refused(host: Tiers) -> None:
    with pytest.raises(ValueError, match=f"a block has {BLOCK_BYTES} bytes, not 192"):
        host.save(key(1), block(1)[:3])


def test_more_host_memory_than_is_available_is_refused_before_allocation() -> None:
    with pytest.raises(ConfigurationError, match=r"target\.kv\.host_bytes: \d+ is refused; it must be at most .*, \d+"):
        Tiers(KvSection(host_bytes=1 << 60), BLOCK_BYTES, CPU).start()


def test_two_ranks_store_the_same_blocks_after_the_same_calls() -> None:
    with tiers_of(3) as one, tiers_of(3) as other:
        for rank in (one, other):
            save(rank, 1, 2, 3)
            rank.load(key(1), empty())
            save(rank, 4, 2, 5)
        assert held(one, range(10)) == held(other, range(10)) == [2, 4, 5]
