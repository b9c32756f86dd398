"""How many blocks a pool has, and what it loads from a disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import PoolSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.ids import BlockId
from workers.kv import copies, pool, pool_size
from workers.kv.allocator import BlockCopy
from workers.kv.pool import KvPool
from workers.kv.pool_size import blocks_that_fit
from workers.kv.spec import KvCacheSpec, LayerShape

SPEC = KvCacheSpec((LayerShape(2, 8),), 64, torch.float32, torch.device("cpu"))
BLOCK_BYTES = 2 * 2 * 8 * 4 * 16


def test_a_pool_takes_its_share_of_the_free_memory_that_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda _: 1000 * BLOCK_BYTES)
    section = KvSection(block_size=16, memory_fraction=0.5)
    assert blocks_that_fit(SPEC, section) == 500
    assert blocks_that_fit(replace(SPEC, reserved_bytes=400 * BLOCK_BYTES), section) == 300
    given = section.model_copy(update={"pool_bytes": 900 * BLOCK_BYTES})
    assert blocks_that_fit(replace(SPEC, reserved_bytes=400 * BLOCK_BYTES), given) == 900


def test_a_target_on_a_gpu_takes_most_of_what_graphs_and_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda _: 1000 * BLOCK_BYTES)
    target = KvSection(block_size=16, step_tokens=2048)
    on_gpu = replace(SPEC, device=torch.device("cuda", 0), reserved_bytes=100 * BLOCK_BYTES)
    computed = replace(on_gpu, step_token_bytes=400 * BLOCK_BYTES // 2048)
    assert blocks_that_fit(on_gpu, target) == 810
    assert blocks_that_fit(computed, target) == 450
    assert blocks_that_fit(SPEC, target) == blocks_that_fit(on_gpu, PoolSection(block_size=16)) + 10 == 100


@pytest.mark.parametrize(
    ("section", "name"), [(KvSection(step_tokens=2048), "target.kv"), (PoolSection(), "draft.model.kv")]
)
def test_configured_bytes_that_leave_a_gpu_no_memory_for_graphs_and_activations_are_refused(
    section: PoolSection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda _: 1000 * BLOCK_BYTES)
    reserved, on_gpu = 100 * BLOCK_BYTES, torch.device("cuda", 0)
    spec = replace(SPEC, device=on_gpu, reserved_bytes=reserved, step_token_bytes=400 * BLOCK_BYTES // 2048)
    most = 500 if isinstance(section, KvSection) else 900
    assert blocks_that_fit(spec, section.model_copy(update={"pool_bytes": most * BLOCK_BYTES})) == most
    given = most * BLOCK_BYTES + 1
    with pytest.raises(ConfigurationError) as refused:
        blocks_that_fit(spec, section.model_copy(update={"pool_bytes": given}))
    assert f"{name}.pool_bytes: {given} is refused; it must be at most {most * BLOCK_BYTES}, " in str(refused.value)


def test_memory_that_loading_has_freed_counts_as_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not know that the allocator of torch holds it for later tensors."""
    cached = [300 * BLOCK_BYTES]
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * BLOCK_BYTES - sum(cached), 2000 * BLOCK_BYTES))
    on_gpu = replace(SPEC, device=torch.device("cuda", 0))
    assert blocks_that_fit(on_gpu, KvSection(block_size=16, memory_fraction=0.5)) == 500


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


def test_what_is_moved_together_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of three trees, two of them within one block, move as they do one after another."""
    sent: list[list[int]] = []
    send = copies.to_device
    monkeypatch.setattr(copies, "to_device", lambda slots, device: sent.append(slots) or send(slots, device))
    paths = ((3, (1, 4, 6)), (9, (0, 2)), (5, (2, 3, 7)))
    results = []
    for together in (False, True):
        moved, draw = KvPool(SPEC, KvSection(block_size=4), 20), torch.Generator().manual_seed(0)
        for stored in (*moved.keys, *moved.values):
            stored.copy_(torch.randn(stored.shape, generator=draw))
        before = [stored.clone() for stored in (*moved.keys, *moved.values)]
        tables = [moved.new_table() for _ in paths]
        sent.clear()
        with moved.moving_together() if together else nullcontext():
            for table, (start, nodes) in zip(tables, paths, strict=True):
                moved.reserve(table, 20)
                moved.move(table, start, nodes)
            unchanged = zip(before, (*moved.keys, *moved.values), strict=True)
            assert all(torch.equal(one, other) for one, other in unchanged) == together
        assert len(sent) == (2 if together else 2 * len(paths))
        results.append([stored.clone() for stored in (*moved.keys, *moved.values)])
    for one, other, old in zip(*results, before, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, old)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks that are copied together, for each time."""
    counts: list[int] = []
    copy = copies.StackCopies.copy_blocks
    monkeypatch.setattr(
        copies.StackCopies, "copy_blocks", lambda own, found: counts.append(len(found)) or copy(own, found)
    )
    return counts


def test_blocks_that_sequences_share_are_copied_at_once(copied: list[int]) -> None:
    """Three forks of a sequence are about to write into the block that they share."""
    for together in (False, True):
        shared = KvPool(SPEC, KvSection(block_size=4), 20)
        table = shared.new_table()
        shared.reserve(table, 6)
        shared.commit(table, range(6))
        for layer, stored in enumerate((*shared.keys, *shared.values)):
            stored[table.blocks[0][1]] = layer + 1.0
        tables = [table, *(shared.fork(table, 6) for _ in range(3))]
        copied.clear()
        with shared.reserving_together() if together else nullcontext():
            for one in tables:
                shared.reserve(one, 7)
            assert copied == ([] if together else [1, 1, 1])
        assert copied == ([3] if together else [1, 1, 1])
        assert len({one.blocks[0][1] for one in tables}) == 4
        for layer, stored in enumerate((*shared.keys, *shared.values)):
            assert all((stored[one.blocks[0][1]] == layer + 1).all() for one in tables)


def test_a_block_that_is_freed_and_taken_again_is_read_before_it_is_written(copied: list[int]) -> None:
    """The copies of a step are made in two parts where one writes what another one reads."""
    shared = KvPool(SPEC, KvSection(block_size=4), 4)
    first, second = shared.new_table(), shared.new_table()
    for number, table in enumerate((first, second)):
        shared.reserve(table, 3)
        shared.commit(table, range(10 * number, 10 * number + 3))
        for stored in (*shared.keys, *shared.values):
            stored[table.blocks[0][0]] = number + 1.0
    forks = shared.fork(first, 3), shared.fork(second, 3)
    with shared.reserving_together():
        shared.reserve(forks[0], 4)  # copies the block of `first`
        freed = first.blocks[0][0]
        shared.release(first)
        shared.reserve(forks[1], 4)  # copies the block of `second` into that of `first`
    assert copied == [1, 1]
    assert forks[1].blocks[0][0] == freed
    for stored in (*shared.keys, *shared.values):
        assert (stored[forks[0].blocks[0][0]] == 1).all()
        assert (stored[forks[1].blocks[0][0]] == 2).all()


class RecordedKernels:
    """`CopyKernels` that copy nothing, and record what they are to copy."""

    def __init__(self) -> None:
        self.launches: list[tuple[list[int], list[int], list[int], int]] = []

    def records_of(self, stacks: Sequence[torch.Tensor]) -> int:
        return sum(len(stack) for stack in stacks)

    def copy_paths(
        self,
        records: int,
        ends: torch.Tensor,
        sources: torch.Tensor,
        destinations: torch.Tensor,
        slots: int = 1,
    ) -> None:
        assert records == 2
        self.launches.append((ends.tolist(), sources.tolist(), destinations.tolist(), slots))


def test_kernels_that_are_given_copy_blocks_and_slots_of_a_step_in_one_launch_each() -> None:
    """Also on a CPU, where they stand for those of a GPU."""
    kernels = RecordedKernels()
    shared = KvPool(SPEC, KvSection(block_size=4), 20, kernels=kernels)
    table = shared.new_table()
    shared.reserve(table, 6)
    shared.commit(table, range(6))
    forks = [shared.fork(table, 6) for _ in range(2)]
    source = table.blocks[0][1]
    with shared.reserving_together():
        for fork in forks:
            shared.reserve(fork, 10)
    destinations = [fork.blocks[0][1] for fork in forks]
    assert kernels.launches == [([0, 1, 2], [source, source], destinations, 4)]
    with shared.moving_together():
        for fork in forks:
            shared.move(fork, 6, (1, 3))
    slots = [[4 * fork.blocks[0][at // 4] + at % 4 for fork in forks for at in ats] for ats in ((7, 9), (6, 7))]
    assert kernels.launches[1:] == [([0, 2, 4], *slots, 1)]


def test_kernels_are_launched_on_the_pools_device_whichever_the_thread_used_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are copied before the pass of a step, which chooses the device of its thread."""

    def choose(device: torch.device) -> None:
        """Stop here: what follows needs the device."""
        raise ValueError(f"chosen: {device}")

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    stacks = copies.StackCopies([torch.zeros(2, 3, 4, 2, 8)], torch.device("cuda", 3), RecordedKernels())
    with pytest.raises(ValueError, match="chosen: cuda:3"):
        stacks.copy_blocks([BlockCopy(BlockId(0), BlockId(1))])
