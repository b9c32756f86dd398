"""The kernels of recurrent layers, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_proof.assembler import Assembled, assembled, compiled_ahead, next_power_of_two

pytestmark = [
    *compiled_ahead(),
    pytest.mark.parametrize("capability", [80, 90, 100]),
]

MOST_REGISTERS = 160
"""Most registers of a thread. With them, a multiprocessor holds at least twelve programs of one warp at once."""
PLAN = dict.fromkeys(("row_starts", "source", "target"), "*i32")


@pytest.mark.parametrize(("channels", "width", "stored"), [(8192, 4, 4), (2048, 3, 3)])
def test_convolutions_do_not_spill(capability: int, channels: int, width: int, stored: int) -> None:
    from workers.forward.triton.convolution import convolve_token

    pointers = dict.fromkeys(("inputs", "weight", "bias", "states", "output"), "*bf16")
    pointers |= dict.fromkeys(("parents", "source", "target"), "*i32")
    constants = {
        "CHANNELS": channels, "BLOCK": 512, "WIDTH": width, "STORED": stored, "MOST": max(width, stored),
        "HAS_BIAS": True, "HAS_SILU": True,
    }  # fmt: skip
    arguments = pointers | {"input_token": "i32"}
    found = assembled(convolve_token, arguments, constants, capability, aligned=list(arguments))
    assert found.spilled_bytes == 0, found


@pytest.mark.parametrize(("keys", "values"), [(128, 128), (64, 128), (96, 192)])
def test_delta_rules_keep_their_state_in_registers(capability: int, keys: int, values: int) -> None:
    from workers.forward.triton.delta_rule import DELTA_WARPS, VALUES, advance_delta_row

    pointers = dict.fromkeys(("query", "key", "log_decay", "beta", "states"), "*fp32")
    pointers |= dict.fromkeys(("value", "output"), "*bf16") | PLAN
    arguments = pointers | dict.fromkeys(("query_token", "key_token", "value_token"), "i32")
    constants = {
        "HEADS": 32, "GROUP": 2, "KEYS": keys, "KEY_WIDTH": next_power_of_two(keys), "VALUES": values,
        "BLOCK": VALUES,
    }  # fmt: skip
    check(assembled(
        advance_delta_row, arguments, constants, capability, warps=DELTA_WARPS, aligned=list(arguments)
    ))  # fmt: skip


@pytest.mark.parametrize(("heads", "dim", "groups", "size"), [(128, 64, 8, 128), (48, 64, 1, 256), (8192, 1, 1, 16)])
def test_state_spaces_keep_their_state_in_registers(
    capability: int, heads: int, dim: int, groups: int, size: int
) -> None:
    from workers.forward.triton.state_space import SPACE_WARPS, advance_space_row, space_channels

    pointers = dict.fromkeys(("inputs", "b", "c", "output"), "*bf16")
    pointers |= dict.fromkeys(("steps", "a", "d", "states"), "*fp32") | PLAN
    arguments = pointers | dict.fromkeys(("input_token", "b_token", "c_token"), "i32")
    constants: dict[str, Any] = {
        "CHANNELS": heads * dim, "HEADS": heads, "GROUPS": groups, "SIZE": size,
        "WIDTH": next_power_of_two(size), "BLOCK": space_channels(heads * dim, groups, size),
        "HAS_DECAYS": dim == 1,
    }  # fmt: skip
    check(assembled(
        advance_space_row, arguments, constants, capability, warps=SPACE_WARPS, aligned=list(arguments)
    ))  # fmt: skip


def check(found: Assembled) -> None:
    assert found.spilled_bytes == 0, found
    assert found.registers <= MOST_REGISTERS
    assert len(found.sums) == 1, "all sums are in one order"
