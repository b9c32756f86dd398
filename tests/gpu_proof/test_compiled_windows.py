"""The attention of drafting modules over windows, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_proof.assembler import assembled, compiled_ahead, next_power_of_two
from workers.forward.triton.tiles import window_tile

pytestmark = compiled_ahead()

POINTERS = {
    **dict.fromkeys(("queries", "output", "sums", "stats"), "*fp32"),
    **dict.fromkeys(("arrivals", "items", "tokens"), "*i32"),
    "table": "*i64",
    "masks": "*u8",
}
STRIDES = ("query_token", "query_head", "output_token", "output_head")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("group", "dim", "value_dim"), [(4, 128, 128), (1, 192, 128)])
def test_windows_are_attended_to_without_spills(group: int, dim: int, value_dim: int, capability: int) -> None:
    from workers.forward.triton import windows

    tile = next_power_of_two(group)
    constants: dict[str, Any] = {
        "HEADS": 8 * group, "GROUP": group, "GROUP_TILE": tile, "TILE": max(window_tile(group, dim), 16 // tile),
        "DIM": dim, "WIDTH": next_power_of_two(dim), "VALUE_DIM": value_dim,
        "VALUE_WIDTH": next_power_of_two(value_dim), "KEY_TILE": windows.keys_of(dim), "IS_ALIGNED": True,
    }  # fmt: skip
    numbers = {"scale": "fp32", **dict.fromkeys(("layer", "split_queries", "splits"), "i32")}
    found = assembled(
        windows.attend_windows,
        POINTERS | numbers | dict.fromkeys(STRIDES, "i32"),
        constants,
        capability,
        stages=windows._STAGES,
        aligned=[*POINTERS, *STRIDES],
    )
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= 160 * 1024
    assert found.fused > 0, "products are exact: float32 is multiplied beside the tensor cores"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (2, 34)])
def test_keys_and_values_of_all_layers_are_stored_without_spills(heads: int, dim: int, capability: int) -> None:
    from workers.forward.triton import windows

    pointers = {"keys": "*fp32", "values": "*fp32", "table": "*i64", "places": "*i32"}
    strides = [f"{part}_{name}" for part in ("key", "value") for name in ("layer", "token", "head")]
    constants: dict[str, Any] = {
        "HEADS": heads, "DIM": dim, "VALUE_DIM": dim, "WIDTH": next_power_of_two(heads * dim), "MOST": 3.4e38,
    }  # fmt: skip
    numbers = dict.fromkeys(["first", *strides], "i32")
    found = assembled(windows.store_windows, pointers | numbers, constants, capability, aligned=[*pointers])
    assert found.spilled_bytes == 0, found
