"""The products before the residual stream, on a GPU or interpreted: the library's, and free of neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from tests.gpu_proof.device import DEVICE, IS_INTERPRETED, needs_kernels
from tests.support.models import tiny
from workers.forward import residual_product as products
from workers.forward.fused_trial import fuse_if_equal
from workers.forward.layer_kernels import TritonKernels
from workers.forward.layer_lists import decoder_layers
from workers.forward.projections import Gated, rms_norm
from workers.forward.residual_product import (
    GATED_ROWS,
    MOST_ROWS,
    NoResidualProduct,
    check_product,
    check_speed,
    most_gated_rows,
    residual_product,
)
from workers.model.loading import load_model

pytestmark = needs_kernels()

OUTPUTS, INPUTS = 136, 1300
"""Neither is a multiple of a tile, and the inputs are two splits."""
COUNTS = (1, 5, 17, 40, 130)
"""Rows: each kind of launch."""


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Whole numbers, of which every sum is exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def product(*, bias: bool = False) -> products.ResidualProduct:
    return residual_product(numbers(OUTPUTS, INPUTS, seed=1), numbers(OUTPUTS, seed=2) if bias else None)


@pytest.mark.parametrize(("rows", "bias"), [*((rows, False) for rows in COUNTS), (1, True)])
def test_a_product_is_added_to_the_stream_and_normalized(rows: int, bias: bool) -> None:
    own, x, stream = product(bias=bias), numbers(rows, INPUTS), numbers(rows, OUTPUTS, seed=3)
    weight = numbers(OUTPUTS, seed=4)
    expected = functional.linear(x.float(), own.weight.float(), None if own.bias is None else own.bias.float())
    added = stream.float() + expected.bfloat16().float()
    sums, normalized = own.add_and_normalize(x, stream, (weight, 1e-6))
    bound = 4 * torch.finfo(torch.bfloat16).eps  # the interpreter cuts off bits of bfloat16
    torch.testing.assert_close(own.multiply(x).float(), expected, rtol=bound, atol=0.0)
    torch.testing.assert_close(sums.float(), added, rtol=bound, atol=bound)
    torch.testing.assert_close(normalized.float(), rms_norm(sums, weight, 1e-6).float(), rtol=bound, atol=bound)
    assert not own.counters.any()


def test_the_matrix_decides_into_how_many_splits_its_inputs_are_divided() -> None:
    from workers.forward.triton.residual import counters_for, splits_of, tiles_of

    assert [splits_of(*shape) for shape in ((4096, 4096), (4096, 14336), (8192, 1024), (896, 896))] == [4, 4, 2, 1]
    assert len({tiles_of(rows) for rows in range(1, MOST_ROWS + 1)}) == 5
    for rows in range(1, 129):
        tiles = tiles_of(rows)
        assert -(-rows // tiles.rows) * (-(-4096 // tiles.outputs) + 1) <= len(counters_for(4096, DEVICE))


def test_no_number_of_rows_changes_a_bit_and_counters_are_zero_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = product()
    products._tried.clear()
    if IS_INTERPRETED:  # a product of numpy adds in an order that depends on the number of rows
        monkeypatch.setattr(torch, "randn", lambda shape, generator: torch.randint(-3, 4, shape, generator=generator))
    check_product(own)
    assert products._tried
    assert not own.counters.any()


def test_neighbours_and_what_lies_behind_a_rows_end_change_no_bit() -> None:
    from workers.forward.triton.residual import splits_of

    assert splits_of(OUTPUTS, INPUTS) == 2
    weights = torch.full((OUTPUTS, INPUTS + 24), math.nan, device=DEVICE)
    weights[:, :INPUTS] = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    own, norm = residual_product(weights[:, :INPUTS], None), (numbers(OUTPUTS, dtype=torch.float32), 1e-6)
    x, stream = (torch.randn(20, size, generator=torch.Generator().manual_seed(1)) for size in (INPUTS, OUTPUTS))
    x, stream = x.to(DEVICE), stream.to(DEVICE)
    whole = own.add_and_normalize(x, stream, norm)
    assert all(bool(part.isfinite().all()) for part in whole)
    x[:7], x[8:], stream[:7], stream[8:] = 1e30, math.nan, math.nan, 1e30
    assert all(
        torch.equal(ours[7], theirs[7])
        for ours, theirs in zip(own.add_and_normalize(x, stream, norm), whole, strict=True)
    )


def gated(rows: int, dtype: torch.dtype) -> Gated:
    """Halves of one product, far from 0 and near it."""
    both = 5 * torch.randn(rows, 2 * INPUTS, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    both[0, :3] = torch.tensor([100.0, -100.0, 0.0])
    return Gated(both[:, :INPUTS], both[:, INPUTS:])


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (5, torch.bfloat16), (16, torch.float32)])
def test_a_product_of_gates_and_values_has_the_bits_of_two_launches(rows: int, dtype: torch.dtype) -> None:
    from workers.forward.triton.gate import silu_mul

    if not IS_INTERPRETED and dtype == torch.float32:
        pytest.skip("on a GPU the kernel does not multiply float32")
    own = residual_product(numbers(OUTPUTS, INPUTS, seed=1, dtype=dtype), None)
    x, stream = gated(rows, dtype), numbers(rows, OUTPUTS, seed=3, dtype=dtype)
    inner, norm = silu_mul(x.gates, x.values), (numbers(OUTPUTS, seed=4, dtype=dtype), 1e-6)
    assert torch.equal(own.multiply(x), own.multiply(inner))
    for found, expected in zip(
        own.add_and_normalize(x, stream, norm), own.add_and_normalize(inner, stream, norm), strict=True
    ):
        assert torch.equal(found, expected)
    assert not own.counters.any()


def test_gates_and_values_of_neighbours_change_no_bit() -> None:
    own, x = product(), gated(9, torch.bfloat16)
    alone = own.multiply(Gated(x.gates[4:5], x.values[4:5]))
    x.gates[:4], x.values[:4], x.gates[5:], x.values[5:] = math.nan, 1e30, 1e30, math.nan
    assert torch.equal(own.multiply(x)[4:5], alone)


@pytest.mark.parametrize(("slow_at", "other_bits_at", "most"), [(None, None, 16), (8, None, 4), (None, 4, 1)])
def test_gates_and_values_are_multiplied_up_to_the_rows_that_are_as_fast_and_have_the_same_bits(
    slow_at: int | None, other_bits_at: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides are really computed; the clock is the test's."""
    from workers.forward.triton import gate

    own, right = residual_product(numbers(64, 128), None), gate.silu_mul
    products._most_gated.clear()
    factor = {other_bits_at: 2.0}
    monkeypatch.setattr(gate, "silu_mul", lambda gates, values: right(gates, values) * factor.get(len(gates), 1.0))
    measured: list[int] = []

    def milliseconds(call: Callable[[], object]) -> float:
        sums, _ = cast("tuple[torch.Tensor, torch.Tensor]", call())
        measured.append(len(sums))
        is_ours = len(measured) % 2 == 1
        return 1.5 if is_ours and len(sums) == slow_at else 1.0

    for _ in range(2):  # matrices of one kind are tried once
        assert most_gated_rows(own, milliseconds) == most
    assert measured == [rows for rows in GATED_ROWS if rows <= (slow_at or most) for _ in range(2)]
    products._most_gated.clear()


def test_a_wrong_product_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    own = product()
    products._tried.clear()
    right = functional.linear
    monkeypatch.setattr(functional, "linear", lambda *arguments: 1.1 * right(*arguments))
    with pytest.raises(NoResidualProduct, match="differs from the reference"):
        check_product(own)


@pytest.mark.parametrize(("slow_at", "problem"), [(None, ""), (8, "with 8 rows it takes 1.50 times as long")])
def test_a_product_that_is_slower_than_the_librarys_is_left_to_it(slow_at: int | None, problem: str) -> None:
    """Both sides are really computed; the clock is the test's."""
    own = product()
    products._slower.clear()
    measured: list[int] = []

    def milliseconds(call: Callable[[], object]) -> float:
        sums, normalized = cast("tuple[torch.Tensor, torch.Tensor]", call())
        assert sums.shape == normalized.shape
        measured.append(len(sums))
        is_ours = len(measured) % 2 == 1
        return 1.5 if is_ours and len(sums) == slow_at else 1.0

    if slow_at is None:
        check_speed(own, milliseconds)
    for _ in range(2):  # matrices of one kind are measured once
        if slow_at is not None:
            with pytest.raises(NoResidualProduct, match=problem):
                check_speed(own, milliseconds)
        else:
            check_speed(own, milliseconds)
    assert measured == ([1, 1, 4, 4, 8, 8, 64, 64] if slow_at is None else [1, 1, 4, 4, 8, 8])
    products._slower.clear()


def test_matrices_whose_inputs_lie_apart_are_refused() -> None:
    with pytest.raises(NoResidualProduct, match="not contiguous"):
        residual_product(numbers(64, 64).t(), None)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the model is on the CPU")
@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen2, tiny.qwen3])
def test_layers_are_fused_with_the_products(
    tmp_path: Path, make: Callable[[], PreTrainedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of whole layers passes, and both products of each layer were made and launched."""
    from workers.forward.triton import residual
    from workers.forward.weights.plain import DenseKernel, PlainStorage

    monkeypatch.setattr(PlainStorage, "kernel", lambda self, bias: DenseKernel(self.weight, bias))  # as on a GPU
    launched: list[bool] = []
    launch = residual.multiply_add_and_normalize

    def count(x: torch.Tensor | Gated, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append(isinstance(x, Gated))
        return launch(x, *others)

    monkeypatch.setattr(residual, "multiply_add_and_normalize", count)
    path = str(tiny.save(tmp_path, make()))
    model = load_model(ModelSection(path=path, device="cpu", native="off", compile="off", dtype="float32"))
    assert fuse_if_equal(model, TritonKernels) is None
    assert launched == [False, True] * len(list(decoder_layers(model.module)))
