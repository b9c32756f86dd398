"""The product with packed weights, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.gpu_proof.assembler import assembled, compiled_ahead
from workers.forward.weights.words import BLOCK, Values, launch_shape

pytestmark = compiled_ahead()

GENERATIONS = (80, 90, 100)
FEW, VERIFIED, MANY = 1, 64, 2048
"""Rows of a decoding step, of a verification and of a prompt: each has a launch of its own."""


@dataclass(frozen=True)
class Format:
    values: Values
    group: int
    """Inputs of a group, at most those of a step."""
    scales: str
    """Type of the scales."""
    offset: str = ""
    """What a group has beside its scale. Those of a k-quant are minima, in bytes."""


FORMATS = {
    "AWQ": Format(Values.INTEGERS4, 128, "fp16", "zero"),
    "W4A16 of bfloat16": Format(Values.INTEGERS4, 128, "bf16"),
    "Q4_1": Format(Values.INTEGERS4, 32, "fp16", "minimum"),
    "Q4_K": Format(Values.INTEGERS4, 32, "i8", "k-quant"),
    "Q8_0": Format(Values.INTEGERS8, 32, "fp16"),
    "W8A16": Format(Values.INTEGERS8, 128, "fp16", "zero"),
    "Q5_K": Format(Values.INTEGERS8, 32, "i8", "k-quant"),
    "int8 of channels": Format(Values.INTEGERS8, 128, "fp32"),
    "fp8 in blocks": Format(Values.E4M3, 128, "fp32"),
    "fp8 of bfloat16": Format(Values.E4M3, 128, "bf16"),
    "MXFP4": Format(Values.E2M1, 32, "fp16"),
    "MXFP4 of float32": Format(Values.E2M1, 32, "fp32"),
    "NF4": Format(Values.TABLE, 64, "fp32"),
}
CASES = [
    *((name, capability, rows) for name in FORMATS for capability in GENERATIONS for rows in (FEW, MANY)),
    *(("AWQ", capability, VERIFIED) for capability in GENERATIONS),
]


@pytest.mark.parametrize(("name", "capability", "rows"), CASES)
def test_packed_weights_are_multiplied_on_tensor_cores_without_spills(name: str, capability: int, rows: int) -> None:
    from workers.forward.triton.group_product import multiply_groups

    shape, form = launch_shape(rows), FORMATS[name]
    scales = f"*{form.scales}"
    arguments = {"x": "*bf16", "words": "*i32", "scales": scales, "offsets": scales, "units": "*fp16"}
    arguments |= {"table": "*bf16", "bias": "*bf16"}
    arguments |= {"output": "*bf16", "partial": "*fp32", "counters": "*i32"}
    sizes = ("rows", "outputs", "inputs", "steps", "splits", "group_steps")
    is_k_quant, has_zero = form.offset == "k-quant", form.offset == "zero" or form.values is Values.INTEGERS4
    constants = {
        "SUPER": 8 if is_k_quant else 0, "GROUP": form.group, "CHUNK": 32, "VALUES": int(form.values),
        "HAS_OFFSET": bool(form.offset), "HAS_MINIMUM": is_k_quant or form.offset == "minimum", "HAS_ZERO": has_zero,
        "HAS_BIAS": False, "HAS_TAIL": False, "IS_SPLIT": shape.splits_apart, "ROWS": shape.rows,
        "TILE": shape.outputs, "BLOCK": BLOCK, "EXACT": False,
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
