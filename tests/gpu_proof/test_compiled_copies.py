"""The kernel that copies slots and blocks of a pool, compiled ahead of time for three generations of GPUs."""

from __future__ import annotations

import pytest

from tests.gpu_proof.assembler import assembled, compiled_ahead

pytestmark = compiled_ahead()


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("together", "is_specialized"), [(16, True), (1, False)], ids=["slots", "blocks"])
@pytest.mark.parametrize(("kind", "is_aligned"), [("i64", True), ("i64", False), ("i16", False)])
def test_entries_are_copied_without_spills(
    capability: int, together: int, is_specialized: bool, kind: str, is_aligned: bool
) -> None:
    from workers.kv.triton.entries import copy_entries

    arguments = {"like": f"*{kind}"} | dict.fromkeys(("table", "ends", "sources", "destinations"), "*i64")
    constants = {"IS_ALIGNED": is_aligned, "TOGETHER": together, "WIDTH": 2048 // together}
    if is_specialized:
        constants["slots"] = 1
    else:
        arguments["slots"] = "i32"
    found = assembled(copy_entries, arguments, constants, capability)
    assert found.spilled_bytes == 0
    assert found.registers <= 128, "four programs of 128 threads run on a multiprocessor at once"
