"""Keys and values in 8 bits: how exact they are, how many fit, and that their scales go wherever they go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.config.model_section import PoolSection
from cluster.core.config.target_section import KvSection
from cluster.core.ids import BlockId
from tests.support.engines.kv_tiers import always_load
from workers.kv.eight_bits import LEAST, STORED_TYPES, dequantize, quantize
from workers.kv.pool import KvPool
from workers.kv.pool_size import block_bytes, blocks_that_fit
from workers.kv.spec import KvCacheSpec, LayerShape

CPU = torch.device("cpu")
SMOLLM2 = (LayerShape(kv_heads=3, head_dim=64, heads_per_kv=3),) * 30
LLAMA_8B = (LayerShape(kv_heads=8, head_dim=128, heads_per_kv=4),) * 32
ROUNDING = {"int8": 0.5 / 127, "fp8": 16 / 448}
"""Largest error of a number, as a share of its head's largest: half a step."""


def spec(layers: tuple[LayerShape, ...], dtype: torch.dtype = torch.float32) -> KvCacheSpec:
    return KvCacheSpec(layers, 1000, dtype, CPU)


def filled(kv: str, blocks: int = 6, layers: tuple[LayerShape, ...] = SMOLLM2[:2], **section: object) -> KvPool:
    """A pool of other keys and values in every position and layer."""
    pool = KvPool(spec(layers), KvSection(dtype=kv, block_size=4, **section), blocks)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(blocks * 4)
    for layer, shape in enumerate(layers):
        keys, values = torch.randn((2, len(slots), shape.kv_heads, shape.head_dim), generator=generator)
        pool.write(layer, slots, keys * torch.logspace(-3, 3, len(slots))[:, None, None], values)
    return pool


def content(pool: KvPool, layer: int, position: int, blocks: list[BlockId]) -> torch.Tensor:
    """The key and the value at a position, `[2, heads, dim]`."""
    keys, values = pool.store.read(layer, torch.tensor(blocks), torch.float32)
    return torch.stack((keys.flatten(0, 1)[position], values.flatten(0, 1)[position]))


@pytest.mark.parametrize("kv", STORED_TYPES)
@given(seed=st.integers(0, 99), exponent=st.integers(-20, 20))
def test_a_number_is_stored_within_half_a_step(kv: str, seed: int, exponent: int) -> None:
    fresh = torch.randn((5, 3, 20), generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    numbers, scales = quantize(fresh, STORED_TYPES[kv])
    error = (dequantize(numbers, scales, torch.float32) - fresh).abs() / fresh.abs().amax(-1, keepdim=True)
    assert float(error.max()) <= 1.001 * ROUNDING[kv]


@pytest.mark.parametrize("kv", STORED_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_stored_is_always_finite(kv: str, dtype: torch.dtype) -> None:
    bad = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1.0])
    numbers, scales = quantize(
        torch.stack((bad, torch.zeros(5), torch.full((5,), 1e-38)))[None].to(dtype), STORED_TYPES[kv]
    )
    assert bool((scales >= LEAST / 448).all())
    for read in (torch.float32, dtype):
        assert bool(dequantize(numbers, scales, read).isfinite().all())
    assert dequantize(numbers, scales, torch.float32)[0, 0, 0] == 0


@pytest.mark.parametrize("kv", STORED_TYPES)
@pytest.mark.parametrize(
    ("layers", "dtype", "more"),
    [
        (SMOLLM2, torch.float32, 3.69),
        (SMOLLM2, torch.bfloat16, 1.84),
        (LLAMA_8B, torch.bfloat16, 1.93),
    ],
    ids=["SmolLM2 float32", "SmolLM2 bfloat16", "Llama 8B bfloat16"],
)
def test_the_same_memory_holds_more_tokens(
    kv: str, layers: tuple[LayerShape, ...], dtype: torch.dtype, more: float
) -> None:
    full, small = (KvSection(dtype=value, pool_bytes=1 << 30) for value in ("auto", kv))
    assert blocks_that_fit(spec(layers, dtype), small) >= more * blocks_that_fit(spec(layers, dtype), full)


@pytest.mark.parametrize("kv", STORED_TYPES)
def test_the_bytes_of_a_pool_count_scales(kv: str) -> None:
    section = KvSection(dtype=kv, block_size=4, pool_bytes=1 << 20)
    pool = KvPool(spec(SMOLLM2), section)
    each = block_bytes(pool.kv_groups, torch.float32, STORED_TYPES[kv])
    assert each == 4 * 30 * 2 * (3 * 64 + 3 * 4 + 4)  # 4 bytes of padding
    assert pool.blocks_total == (1 << 20) // each
    assert sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)) == pool.blocks_total * each
    assert not pool.is_lossless


def test_draft_models_have_no_such_setting() -> None:
    assert "dtype" not in PoolSection.model_fields


@pytest.mark.parametrize("kv", STORED_TYPES)
def test_accepted_nodes_move_with_their_scales(kv: str) -> None:
    pool = filled(kv)
    table = pool.new_table()
    pool.reserve(table, 12)
    pool.commit(table, range(5))
    pool.reserve(table, 12)
    blocks = table.blocks[0]
    expected = [content(pool, layer, 5 + node, blocks) for layer in range(2) for node in (1, 4, 6)]
    pool.move(table, 5, (1, 4, 6))
    found = [content(pool, layer, 5 + place, blocks) for layer in range(2) for place in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kv", STORED_TYPES)
def test_a_forks_copy_has_the_scales(kv: str) -> None:
    pool = filled(kv)
    table = pool.new_table()
    pool.reserve(table, 6)
    pool.commit(table, range(6))
    fork = pool.fork(table, 6)
    pool.reserve(fork, 7)
    assert fork.blocks[0][1] != table.blocks[0][1]  # both will write into it
    for layer in range(2):
        for position in (4, 5):
            assert torch.equal(
                content(pool, layer, position, fork.blocks[0]), content(pool, layer, position, table.blocks[0])
            )


@pytest.mark.parametrize("kv", STORED_TYPES)
@pytest.mark.parametrize("medium", ["host", "disk"])
def test_a_block_comes_back_from_a_tier_with_its_scales(kv: str, medium: str, tmp_path: object) -> None:
    tier = {"host_bytes": 1 << 20} if medium == "host" else {"disk_directory": str(tmp_path)}
    pool = filled(kv, **tier)
    always_load(pool)
    table = pool.new_table()
    pool.reserve(table, 9)
    pool.commit(table, range(9))
    expected = [content(pool, layer, position, table.blocks[0]) for layer in range(2) for position in range(8)]
    pool.release(table)
    other = pool.new_table()
    pool.reserve(other, 24)  # evicts every block
    if pool.tiers is not None:
        pool.tiers.flush()
    pool.release(other)
    for stored in (*pool.keys, *pool.values):
        stored.zero_()
    again = pool.open(range(9))
    assert again.stored_len == 8
    found = [content(pool, layer, position, again.blocks[0]) for layer in range(2) for position in range(8)]
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert not torch.equal(found[0], torch.zeros_like(found[0]))
    pool.close()
