"""The kernel that copies slots and blocks of a pool, interpreted or on a GPU: the same bytes as PyTorch's indexing."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.config.target_section import KvSection
from cluster.core.ids import BlockId
from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.kv.allocator import BlockCopy
from workers.kv.copies import Path, StackCopies, copy_entries
from workers.kv.pool import KvPool
from workers.kv.spec import KvCacheSpec, LayerShape

pytestmark = needs_kernels()

BLOCKS, SIZE = 24, 4


@pytest.fixture(autouse=True)
def _kernel_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackCopies, "has_kernel", True)


def stacks_of(*slots: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    """Stacks of 2 records and more, whose slots have these shapes, of random bytes."""
    generator = torch.Generator().manual_seed(0)
    stacks = []
    for index, slot in enumerate(slots):
        shape = (2 * index + 2, BLOCKS, SIZE, *slot)
        drawn = torch.empty(shape, dtype=dtype).view(torch.uint8).random_(0, 256, generator=generator)
        stacks.append(drawn.to(DEVICE).view(dtype))
    return stacks


def copied(stacks: list[torch.Tensor], paths: list[Path]) -> list[torch.Tensor]:
    """The stacks after all paths are copied by the reference, as bytes."""
    found = [stack.clone() for stack in stacks]
    sources, destinations = (
        torch.tensor(list(chain.from_iterable(slots)), dtype=torch.int64, device=DEVICE)
        for slots in zip(*paths, strict=True)
    )
    copy_entries([stack.flatten(1, 2) for stack in found], sources, destinations)
    return [stack.view(torch.uint8) for stack in found]


def check(stacks: list[torch.Tensor], paths: list[Path]) -> None:
    """Both copy alike, and something is copied."""
    expected = copied(stacks, paths)
    assert any(not torch.equal(stack.view(torch.uint8), other) for stack, other in zip(stacks, expected, strict=True))
    StackCopies(stacks, DEVICE).copy_paths(paths)
    assert all(torch.equal(stack.view(torch.uint8), other) for stack, other in zip(stacks, expected, strict=True))


def path_of(positions: list[int], start: int, blocks: list[int]) -> Path:
    """The path of tree nodes at these positions, to those from `start` on, in a sequence that has these blocks."""
    slots = [blocks[position // SIZE] * SIZE + position % SIZE for position in range(len(blocks) * SIZE)]
    return Path([slots[one] for one in positions], slots[start : start + len(positions)])


@pytest.mark.parametrize(
    ("slots", "dtype"),
    [
        (((8, 64), (2, 128)), torch.bfloat16),
        (((3, 20),), torch.float32),
        (((400,), (1296,)), torch.uint8),  # records of 8 bits, with their scales
        (((1, 36), (1, 33)), torch.bfloat16),  # slots whose sizes 4 divides, and 2
        (((3,),), torch.uint8),
    ],
)
def test_paths_whose_ends_overlap_their_beginnings_move_in_all_layers(
    slots: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    """Most nodes of a path are read from a slot that another node of it is written to."""
    paths = [path_of([5, 7, 8, 9, 11, 14], 4, [3, 0, 9, 7]), path_of([1, 2, 3], 0, [5]), path_of([6], 3, [8, 1])]
    check(stacks_of(*slots, dtype=dtype), paths)


def test_paths_of_more_nodes_than_a_program_holds_at_once() -> None:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    check(stacks_of((2, 16), dtype=torch.float16), [path_of(list(range(3, 80, 2)), 2, order)])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_paths_move_as_by_the_reference(data: st.DataObject) -> None:
    blocks = data.draw(st.permutations(range(BLOCKS)))
    paths = []
    for own in (blocks[:3], blocks[3:4], blocks[4:20]):
        start = data.draw(st.integers(0, len(own) * SIZE - 2))
        positions = st.sets(st.integers(start, len(own) * SIZE - 1), min_size=1).map(sorted)
        paths.append(path_of(data.draw(positions), start, own))
    paths.append(path_of([3], 0, blocks[20:21]))
    check(stacks_of((2, 8), (24,), dtype=torch.float32), paths)


def test_blocks_are_copied_whole() -> None:
    stacks = stacks_of((8, 80), (400,), dtype=torch.bfloat16)
    copies = [BlockCopy(BlockId(source), BlockId(destination)) for source, destination in ((3, 0), (3, 23), (7, 1))]
    expected = [stack.clone() for stack in stacks]
    for stack in expected:
        for copy in copies:
            stack[:, copy.destination] = stack[:, copy.source]
    StackCopies(stacks, DEVICE).copy_blocks(copies)
    for stack, other in zip(stacks, expected, strict=True):
        assert torch.equal(stack.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_a_pool_moves_what_sequences_accept_as_without_the_kernel(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two shapes; a fork copies the block that it writes into; two paths move together."""
    results = []
    for has_kernel in (False, True):
        monkeypatch.setattr(StackCopies, "has_kernel", has_kernel)
        layers = (LayerShape(3, 20), LayerShape(1, 40), LayerShape(3, 20))
        spec = KvCacheSpec(layers=layers, max_context_len=64, dtype=torch.float32, device=DEVICE)
        pool = KvPool(spec, KvSection(block_size=SIZE, dtype=kv), BLOCKS)
        drawn = torch.Generator().manual_seed(2)
        for stored in (*pool.keys, *pool.values):
            stored.view(torch.uint8).copy_(
                torch.randint(0, 255, stored.view(torch.uint8).shape, generator=drawn, dtype=torch.uint8)
            )
        pool.warm_up()
        table = pool.new_table()
        pool.reserve(table, 20)
        pool.commit(table, range(6))
        fork = pool.fork(table, 6)
        with pool.reserving_together():
            for own in (table, fork):
                pool.reserve(own, 20)
        with pool.moving_together():
            pool.move(table, 6, (1, 4, 6))
            pool.move(fork, 6, (0, 2))
        results.append([stored.view(torch.uint8).clone() for stored in (*pool.keys, *pool.values)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
