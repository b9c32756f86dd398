"""The product with packed weights, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

import pytest

from tests.gpu_proof.assembler import assembled, compiled_ahead
from workers.forward.weights.words import BLOCK, Values, launch_shape

pytestmark = compiled_ahead()

ROWS = (1, 64, 2048)
"""Rows of a decoding step, of a verification and of a prompt: each has a launch of its own."""
CASES = [
    *((capability, Values.INTEGERS4, 128, "zero", rows) for capability in (80, 90, 100) for rows in ROWS),
    (80, Values.INTEGERS4, 32, "minimum", 1),
    (90, Values.INTEGERS8, 32, "", 1),
    (80, Values.E4M3, 128, "", 1),
    (100, Values.E2M1, 32, "", 1),
    (90, Values.E2M1, 32, "", 2048),
    *((capability, Values.INTEGERS4, 32, "k-quant", rows) for capability in (80, 90) for rows in (1, 2048)),
]
"""Generation, values, inputs of a group, what a group has beside its scale (`k-quant`: minima, in bytes), and rows."""


@pytest.mark.parametrize(("capability", "values", "group", "offset", "rows"), CASES)
def test_packed_weights_are_multiplied_on_tensor_cores_without_spills(
    capability: int, values: Values, group: int, offset: str, rows: int
) -> None:
    from workers.forward.triton.group_product import multiply_groups

    shape = launch_shape(rows)
    arguments = {"x": "*bf16", "words": "*i32", "scales": "*fp16", "offsets": "*fp16", "units": "*fp16"}
    if offset == "k-quant":
        arguments |= {"scales": "*i8", "offsets": "*i8"}
    arguments |= {"bias": "*bf16"}
    arguments |= {"output": "*bf16", "partial": "*fp32", "counters": "*i32"}
    sizes = ("rows", "outputs", "inputs", "steps", "splits", "group_steps")
    constants = {
        "SUPER": 8 if offset == "k-quant" else 0, "GROUP": group, "CHUNK": 32, "VALUES": int(values),
        "HAS_OFFSET": bool(offset),
        "HAS_MINIMUM": offset in ("minimum", "k-quant"), "HAS_ZERO": values is Values.INTEGERS4, "HAS_BIAS": False,
        "HAS_TAIL": False, "IS_SPLIT": shape.splits_apart, "ROWS": shape.rows, "TILE": shape.outputs, "BLOCK": BLOCK,
        "EXACT": False,
    }  # fmt: skip
    found = assembled(
        multiply_groups,
        arguments | dict.fromkeys(sizes, "i32") | {"zero": "fp32"},
        constants,
        capability,
        warps=shape.warps,
        stages=shape.stages,
        aligned=[*arguments, "outputs", "inputs"],
    )
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= 96 * 1024
    assert found.tensor_products > 0
    assert not found.is_asynchronous, "products of whole warp groups may add in another order"
