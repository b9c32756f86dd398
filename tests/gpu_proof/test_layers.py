"""The kernels between a layer's products, interpreted or on a GPU: equal to PyTorch's operators, free of neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from cluster.core.kv import KvLayout
from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.forward.projections import HeadNorms, Projections, rms_norm
from workers.kv.eight_bits import STORED_TYPES, record_bytes
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

pytestmark = needs_kernels()

TYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [64, 96, 130]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A few last bits apart: sums have an order of their own, and the interpreter cuts off bits of bfloat16.

    A GPU's exponentials and square roots of float32 are approximations.
    """
    bound = (4 if ours.dtype == torch.bfloat16 else 2) * torch.finfo(ours.dtype).eps
    if DEVICE.type == "cuda" and ours.dtype == torch.float32:
        bound *= 8
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_a_norm_with_and_without_an_addition(dtype: torch.dtype, dim: int) -> None:
    from workers.forward.triton.norm import add_and_normalize, normalize

    rows, added, weight = (drawn(5, dim, dtype=dtype, seed=seed) for seed in range(3))
    sums, normalized = add_and_normalize(rows, added, weight[0], 1e-6)
    if dtype == torch.bfloat16:
        close(sums, rows + added)
    else:
        assert torch.equal(sums, rows + added)
    close(normalized, rms_norm(rows + added, weight[0], 1e-6))
    close(normalize(rows, weight[0], 1e-5), rms_norm(rows, weight[0], 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 1500])
def test_silu_times_the_other_half(dtype: torch.dtype, width: int) -> None:
    from workers.forward.triton.gate import silu_mul

    both = 5 * drawn(3, 2 * width, dtype=dtype)  # as one product of gates and values
    gates, values = both.split(width, dim=1)
    gates[0, :3] = torch.tensor([100.0, -100.0, 0.0], device=DEVICE)
    ours = silu_mul(gates, values)
    assert ours.is_contiguous()
    close(ours, functional.silu(gates) * values)


def projections(tokens: int, dtype: torch.dtype, heads: tuple[int, int, int], turned: int, norms: bool) -> Projections:
    """Parts of one product, of heads, KV heads and numbers of a head."""
    count, kv_count, dim = heads
    whole = 3 * drawn(tokens, (count + 2 * kv_count) * dim, dtype=dtype)
    angles = drawn(tokens, turned // 2, dtype=torch.float32, seed=1).repeat(1, 2)
    weights = HeadNorms(drawn(dim, dtype=dtype, seed=2), drawn(dim, dtype=dtype, seed=3), 1e-6) if norms else None
    parts = whole.split([count * dim, kv_count * dim, kv_count * dim], dim=1)
    return Projections(*parts, angles.cos().to(dtype), angles.sin().to(dtype), dim, weights)


def pool(heads: tuple[int, int, int], dtype: torch.dtype, kv: torch.dtype | None = None) -> KvStore:
    """One layer, of numbers that no test stores."""
    shape = LayerShape(heads[1], heads[2])
    size, kind = (heads[1:], dtype) if kv is None else ((record_bytes(shape),), torch.uint8)
    keys, values = (torch.full((6, 16, *size), 7, dtype=kind, device=DEVICE) for _ in range(2))
    placements = (LayerPlacement(0, 0, AttentionWindow()),)
    return KvStore(KvCacheGroups(KvLayout(16), placements, (shape,)), [keys], [values], kv)


def layer_of(store: KvStore) -> Any:
    from workers.forward.triton import eight_bits

    return eight_bits.layer_of(store.of(0), None if store.stored is None else store.scales_of(0))


SLOTS = torch.tensor([3, 90, 17, 18], device=DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "turned"), [((4, 2, 32), 32), ((6, 3, 80), 80), ((3, 1, 64), 16)])
@pytest.mark.parametrize("kv", [None, *STORED_TYPES.values()])
def test_rotated_queries_and_stored_keys(
    dtype: torch.dtype, norms: bool, heads: tuple[int, int, int], turned: int, kv: torch.dtype | None
) -> None:
    from workers.forward.triton.rotary import rotate_and_write

    fresh = projections(4, dtype, heads, turned, norms)
    fresh.values[1, :3] = torch.tensor([math.nan, math.inf, -math.inf], device=DEVICE)
    ours, theirs = pool(heads, dtype, kv), pool(heads, dtype, kv)
    queries = rotate_and_write(fresh, SLOTS, layer_of(ours))
    expected, keys, values = fresh.rotated()
    theirs.write(0, SLOTS, keys, values)
    assert queries.is_contiguous()
    close(queries, expected)
    if kv is None:
        close(ours.keys[0], theirs.keys[0])
    else:  # a few last bits of a key may change which number is the nearest
        read = torch.tensor([0, 1, 5], device=DEVICE)
        own, other = (store.read(0, read, torch.float32)[0] for store in (ours, theirs))
        step = 1 / 127 if kv is torch.int8 else 1 / 14
        assert bool(((own - other).abs() <= (step + 8 * torch.finfo(dtype).eps) * other.abs().amax(-1, True)).all())
    assert torch.equal(ours.values[0], theirs.values[0])


def test_neighbours_change_no_bit() -> None:
    from workers.forward.triton.gate import silu_mul
    from workers.forward.triton.norm import add_and_normalize
    from workers.forward.triton.rotary import rotate_and_write

    rows, added = (drawn(4, 96, dtype=torch.float32, seed=seed) for seed in range(2))
    heads = (4, 2, 32)
    fresh = projections(4, torch.float32, heads, 32, norms=True)
    together, beside = pool(heads, torch.float32), pool(heads, torch.float32)
    queries = rotate_and_write(fresh, SLOTS, layer_of(together))
    normalized, gated = add_and_normalize(rows, added, rows[0], 1e-6)[1], silu_mul(rows, added)
    for row in range(4):
        own = slice(row, row + 1)
        parts = (part[own] for part in (fresh.queries, fresh.keys, fresh.values, fresh.cosines, fresh.sines))
        alone = rotate_and_write(Projections(*parts, fresh.dim, fresh.norms), SLOTS[own], layer_of(beside))
        assert torch.equal(alone, queries[own])
        assert torch.equal(add_and_normalize(rows[own], added[own], rows[0], 1e-6)[1], normalized[own])
        assert torch.equal(silu_mul(rows[own], added[own]), gated[own])
    assert torch.equal(together.keys[0], beside.keys[0])
    assert torch.equal(together.values[0], beside.values[0])
