"""The kernels for experts of a mixture, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

import os

import pytest

from tests.gpu_proof.assembler import assembled

triton = pytest.importorskip("triton", reason="triton is not installed: make gpu-proof installs it")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 interprets the kernels instead"
)

MOST_SHARED = 160 * 1024


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(
    ("experts", "outputs", "inputs", "is_gated"), [(128, 1536, 2048, True), (32, 2880, 2880, False)]
)
def test_experts_are_multiplied_on_tensor_cores_without_spills(
    capability: int, is_wide: bool, experts: int, outputs: int, inputs: int, is_gated: bool
) -> None:
    from workers.forward.triton import experts as kernels

    arguments = dict.fromkeys(("x", "matrices", "biases", "output"), "*bf16")
    arguments |= dict.fromkeys(("order", "ends", "tile_ends"), "*i32")
    arguments |= dict.fromkeys(("x_row", "matrix_expert", "matrix_output", "matrix_input", "output_row"), "i32")
    tile = kernels.WIDE_TILE if is_wide else kernels.NARROW_TILE
    constants = {
        "EXPERTS": experts, "EXPERTS_TILE": experts, "EACH": 8 if is_gated else 0, "INPUTS": inputs,
        "OUTPUTS": outputs, "WIDTH": outputs // 2 if is_gated else outputs,
        "TILE": tile, "COLUMNS": kernels.COLUMNS,
        "STEP": kernels.STEP, "IS_GATED": is_gated, "HAS_BIAS": not is_gated, "EXACT": False,
    }  # fmt: skip
    found = assembled(kernels.multiply_tiles, arguments, constants, capability, warps=kernels.warps_of(tile))
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= MOST_SHARED
    assert found.tensor_products > 0


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_experts_are_added_without_spills(capability: int) -> None:
    from workers.forward.triton.experts import add_rows

    arguments = dict.fromkeys(("products", "weights", "output"), "*bf16") | {"rows": "*i32"}
    found = assembled(add_rows, arguments, {"EACH": 8, "WIDTH": 2048, "COLUMNS": 1024}, capability)
    assert found.spilled_bytes == 0
