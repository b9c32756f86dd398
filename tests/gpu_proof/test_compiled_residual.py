"""The products before the residual stream, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_proof.assembler import Assembled, assembled, compiled_ahead, next_power_of_two

pytestmark = compiled_ahead()

MOST_SHARED = 160 * 1024
ROWS = (1, 5, 32, 128, 1024)
"""Rows of decoding steps, alone, few and some, of a verification and of a prompt chunk: each has its own launch."""
CASES = [
    *((capability, rows, 4096, 14336) for capability in (80, 90, 100) for rows in ROWS),
    (90, 1, 8192, 1024),
    (90, 1, 896, 896),
]
"""Generation, rows, outputs and inputs."""
STRIDES = ("gate_row", "value_row", "weight_row")


def compiled(rows: int, outputs: int, inputs: int, capability: int, *, is_gated: bool = False) -> Assembled:
    from workers.forward.triton import residual

    tiles, splits = residual.tiles_of(rows), residual.splits_of(outputs, inputs)
    pointers = dict.fromkeys(("gates", "values", "weight", "bias", "stream", "norm", "output", "normalized"), "*bf16")
    pointers |= {"partial": "*fp32", "counters": "*i32"}
    constants: dict[str, Any] = {
        "INPUTS": inputs, "OUTPUTS": outputs, "WIDTH": next_power_of_two(outputs), "SPLITS": splits,
        "PER_SPLIT": -(-inputs // splits // 128) * 128, "ROWS": tiles.rows, "TILE": tiles.outputs, "STEP": tiles.step,
        "IS_APART": tiles.is_apart and splits > 1, "HAS_BIAS": False, "ADDS": True, "NORMALIZES": tiles.normalizes,
        "GATED": is_gated, "EXACT": False,
    }  # fmt: skip
    return assembled(
        residual.multiply_splits,
        pointers | {"rows": "i32", "epsilon": "fp32"} | dict.fromkeys(STRIDES, "i32"),
        constants,
        capability,
        warps=tiles.warps,
        stages=tiles.stages,
        aligned=[*pointers, *STRIDES],
    )


@pytest.mark.parametrize(("capability", "rows", "outputs", "inputs"), CASES)
def test_products_run_on_tensor_cores_without_spills(capability: int, rows: int, outputs: int, inputs: int) -> None:
    found = compiled(rows, outputs, inputs, capability)
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= MOST_SHARED
    assert found.tensor_products > 0
    assert found.is_asynchronous is (capability > 80), "one kind of instruction at every number of rows"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("rows", [1, 16])
def test_products_of_gates_and_values_run_on_tensor_cores_without_spills(capability: int, rows: int) -> None:
    found, apart = (compiled(rows, 4096, 14336, capability, is_gated=each) for each in (True, False))
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= MOST_SHARED
    assert found.tensor_products == apart.tensor_products
    assert found.is_asynchronous is apart.is_asynchronous


def test_a_row_is_normalized_in_the_order_of_the_kernel_that_only_normalizes() -> None:
    from workers.forward.triton.norm import NORM_WARPS, normalize_rows

    pointers = dict.fromkeys(("rows", "added", "weight", "sums", "output"), "*bf16")
    constants = {"DIM": 4096, "WIDTH": 4096, "ADDS": False}
    alone = assembled(
        normalize_rows, pointers | {"epsilon": "fp32"}, constants, 90, warps=NORM_WARPS, aligned=list(pointers)
    )
    assert len(alone.sums) == 1
    assert compiled(1, 4096, 4096, 90).sums == alone.sums
