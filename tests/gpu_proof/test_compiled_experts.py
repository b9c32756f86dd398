"""The kernels for experts of a mixture, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

import pytest

from tests.gpu_proof.assembler import assembled, compiled_ahead

pytestmark = compiled_ahead()

MOST_SHARED = 160 * 1024


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gate", "blocks"),
    [(1536, 2048, 1, 0), (2048, 768, 0, 0), (5760, 2880, 2, 0), (5760, 2880, 2, 90), (2880, 2880, 0, 90)],
)
def test_experts_are_multiplied_on_tensor_cores_without_spills(
    capability: int, is_wide: bool, outputs: int, inputs: int, gate: int, blocks: int
) -> None:
    """The matrices of Qwen3-30B-A3B, and those of gpt-oss, which have biases, in bfloat16 and in MXFP4."""
    from workers.forward.triton import experts as kernels

    pointers = dict.fromkeys(("x", "matrices", "biases", "output"), "*bf16")
    pointers |= dict.fromkeys(("order", "tiles", "count"), "*i32") | {"exponents": "*bf16"}
    if blocks:
        pointers |= {"matrices": "*u8", "exponents": "*i8"}
    strides = dict.fromkeys(("x_row", "matrix_expert", "matrix_output"), "i32")
    tile = kernels.WIDE_TILE if is_wide else kernels.NARROW_TILE
    constants = {
        "EACH": 8 if gate else 0, "INPUTS": inputs, "OUTPUTS": outputs, "TILE": tile, "ROWS": kernels.outputs_of(tile),
        "STEP": kernels.step_of(tile), "BLOCKS": blocks, "GATE": gate, "HAS_BIAS": inputs == 2880, "EXACT": False,
    }  # fmt: skip
    found = assembled(
        kernels.multiply_tiles,
        pointers | dict.fromkeys(("alpha", "limit"), "fp32") | strides,
        constants,
        capability,
        warps=kernels.warps_of(tile),
        stages=kernels.stages_of(tile),
        aligned=[*pointers, *strides],
    )
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= MOST_SHARED
    assert found.tensor_products > 0


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_experts_are_chosen_listed_and_added_without_spills(capability: int) -> None:
    from workers.forward.triton.experts import add_rows, choose_experts, route_expert

    arguments = dict.fromkeys(("products", "weights", "output"), "*bf16") | {"rows": "*i32"}
    found = assembled(add_rows, arguments, {"EACH": 8, "WIDTH": 2048, "COLUMNS": 1024}, capability)
    assert found.spilled_bytes == 0
    arguments = {"chosen": "*i64"} | dict.fromkeys(("order", "places", "tiles", "count"), "*i32") | {"rows": "i32"}
    constants = {"EXPERTS": 128, "BINS": 256, "TILE": 16, "CHUNK": 1024}
    assert assembled(route_expert, arguments, constants, capability).spilled_bytes == 0
    arguments = dict.fromkeys(("logits", "weights"), "*bf16") | {"chosen": "*i64", "row": "i32"}
    constants = {"EXPERTS": 128, "WIDTH": 128, "EACH": 8, "EACH_WIDTH": 8, "OF_ALL": False}
    assert assembled(choose_experts, arguments, constants, capability, warps=1).spilled_bytes == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dim", [2880, 4096])
def test_experts_are_added_to_the_stream_and_normalized_without_spills(capability: int, dim: int) -> None:
    from workers.forward.triton.experts import add_rows_and_normalize
    from workers.forward.triton.norm import NORM_WARPS

    names = ("products", "weights", "stream", "norm", "sums", "normalized")
    arguments = dict.fromkeys(names, "*bf16") | {"rows": "*i32", "epsilon": "fp32"}
    constants = {"EACH": 8, "DIM": dim, "WIDTH": 4096}
    found = assembled(add_rows_and_normalize, arguments, constants, capability, warps=NORM_WARPS)
    assert found.spilled_bytes == 0
