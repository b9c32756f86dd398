"""The kernels that decide tokens, compiled ahead of time: no spills, and no fused rounding where bits matter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_proof.assembler import Assembled, assembled, compiled_ahead

pytestmark = compiled_ahead()
CAPABILITIES = [80, 90, 100]
COLUMNS = 4096
ROWS = {
    "temperatures": "*fp32", "masks": "*i32", "excluded": "*i32", "ends": "*i32", "columns": "*i32", "factors": "*fp32",
    "terms": "*fp32", "size": "i32", "stride": "i32", "column_tiles": "i32",
}  # fmt: skip
SEARCH = {"limits": "*i64", "shares": "*fp64"}


def compiled(kernel: Any, arguments: dict[str, str], constants: dict[str, Any], capability: int) -> Assembled:
    found = assembled(kernel, arguments, constants, capability, warps=8, fuses=False)
    assert found.spilled_bytes == 0
    assert found.registers <= 128, "two groups of 256 threads run on a multiprocessor at once"
    assert found.fused == 0
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("truncates", [False, True])
def test_the_pass_over_the_logits(capability: int, kind: str, truncates: bool) -> None:
    from workers.sampling.triton.winners import best_of_tiles

    arguments = {"logits": f"*{kind}"} | ROWS | {"seeds": "*i64", "positions": "*i64", "lines": "*i64"}
    arguments |= {"truncations": "*i32", "bests": "*fp32", "edges": "*i64", "gaps": "*fp32"}
    arguments |= {"parts": "*fp32", "part_columns": "*i32", "offset": "i32"}
    compiled(best_of_tiles, arguments, {"COUNT": COLUMNS, "TRUNCATES": truncates}, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_passes_before_and_after_it(capability: int) -> None:
    from workers.sampling.triton.rows import exclude_entries
    from workers.sampling.triton.winners import join_tiles, largest_logits

    largest = {"logits": "*bf16"} | ROWS | {"truncated": "*i32", "orders": "*i32", "truncations": "*i32"}
    compiled(largest_logits, largest, {"COUNT": COLUMNS}, capability)
    joined = {"parts": "*fp32", "part_columns": "*i32", "values": "*fp32", "tokens": "*i64"}
    compiled(join_tiles, joined | {"tiles": "i32", "offset": "i32"}, {"TILES": 64}, capability)
    entries = dict.fromkeys(("excluded", "masks", "rows", "columns"), "*i32") | {"entries": "i32", "words": "i32"}
    compiled(exclude_entries, entries, {"COUNT": 1024}, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("shift", "bits"), [(44, 11), (22, 11), (0, 11), (46, 8), (22, 8)])
@pytest.mark.parametrize("by_mass", [False, True])
def test_top_k_and_top_p(capability: int, shift: int, bits: int, by_mass: bool) -> None:
    """Digits of 8 bits are those of a logit that ranks find together."""
    from workers.sampling.triton.truncation import choose_digits, sum_digits

    constants = {"BY_MASS": by_mass, "SHIFT": shift, "FIRST": shift + bits >= 54, "BITS": bits, "BINS": 1 << bits}
    state = {"edges": "*i64", "prefixes": "*i64"}
    arguments = {"logits": "*bf16"} | ROWS | {"truncated": "*i32"} | SEARCH | {"tails": "*fp32", "bests": "*fp32"}
    summed = arguments | state | {"sums": "*i64", "offset": "i32"}
    compiled(sum_digits, summed, constants | {"COUNT": COLUMNS}, capability)
    compiled(choose_digits, SEARCH | state | {"wanted": "*i64", "sums": "*i64"}, constants, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_the_pass_for_log_probabilities(capability: int, kind: str) -> None:
    from workers.sampling.triton.logprobs import join_parts, read_tile

    arguments = {"logits": f"*{kind}", "tokens": "*i64", "parts": "*fp64"}
    read = arguments | {"largest": "*fp32", "size": "i32", "stride": "i32", "blocks": "i32"}
    joined = arguments | {"numbers": "*fp64", "tiles": "i32", "stride": "i32"}
    found = (
        assembled(read_tile, read, {"COUNT": 2048, "BLOCK": 64}, capability, warps=8),
        assembled(join_parts, joined, {"TILES": 64}, capability),
    )
    assert [one.spilled_bytes for one in found] == [0, 0]
    assert all(one.registers <= 128 for one in found)
