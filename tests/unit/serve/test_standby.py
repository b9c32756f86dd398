"""`target.standby` says which processes wait with loaded libraries for a lost rank."""

from __future__ import annotations

import pytest

from cluster.core.config.target_section import TargetSection
from workers.serve.rank_placement import has_spare_ranks, waits_again

ONE_FOR_ALL, EACH_RANK, NONE = (True, False), (False, True), (False, False)
"""Whether one process waits for all replicas, and whether each rank has a spare one of its own."""


@pytest.mark.parametrize(
    ("standby", "ranks", "device", "is_local", "expected"),
    [
        ("auto", 1, "cpu", True, ONE_FOR_ALL),
        ("auto", 3, "cpu", True, NONE),
        ("auto", 1, "cuda", True, NONE),
        ("auto", 1, "cpu", False, NONE),
        ("auto", 3, "cpu", False, NONE),
        (True, 1, "cpu", True, ONE_FOR_ALL),
        (True, 3, "cpu", True, EACH_RANK),
        (True, 1, "cpu", False, EACH_RANK),
        (True, 3, "cpu", False, EACH_RANK),
        (False, 1, "cpu", True, NONE),
        (False, 3, "cpu", False, NONE),
    ],
)
def test_what_waits(standby: str | bool, ranks: int, device: str, is_local: bool, expected: tuple[bool, bool]) -> None:
    target = TargetSection.model_validate({"standby": standby, "tensor_parallel": ranks, "device": device})
    waits = is_local and waits_again(target, device)  # nothing waits for all replicas where Ray was there before
    assert (waits, has_spare_ranks(target, is_local=is_local)) == expected


def test_one_process_waits_by_default() -> None:
    assert waits_again(TargetSection(), "cpu")
    assert not has_spare_ranks(TargetSection(), is_local=False)
