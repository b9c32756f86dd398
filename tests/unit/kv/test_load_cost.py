"""A block is loaded only if that is faster than computing its tokens. Ranks agree on the blocks to load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cluster.core.config.base import MIB
from tests.support.engines.kv_tiers import key, save, tiers_of
from workers.kv.load_cost import CostModel, Medium
from workers.kv.tiers import agreed_length


def test_until_measured_loading_counts_as_slow_and_computing_as_fast() -> None:
    costs = CostModel()
    assert costs.worth_loading(16 * 10_000, 0, 16)
    assert not costs.worth_loading(16 * 100_000, 0, 16)
    assert costs.worth_loading(0, 16 * 1_000, 16)
    assert not costs.worth_loading(0, 16 * 10_000, 16)


def test_measurements_outweigh_the_beginning() -> None:
    costs = CostModel()
    costs.record_compute(512, 512, 1.0)
    assert costs.worth_loading(16 * 1_000_000, 0, 16)
    for _ in range(20):
        costs.record_load(Medium.HOST, MIB, 0.5)
    assert not costs.worth_loading(16 * 100_000, 0, 16)
    assert costs.worth_loading(0, 16 * 1_000, 16), "the other medium has its own cost"


def test_passes_over_few_tokens_are_not_measured() -> None:
    costs = CostModel()
    for _ in range(100):
        costs.record_compute(1, 1, 0.05)
    assert not costs.worth_loading(16 * 100_000, 0, 16)


def test_steps_of_many_decoding_sequences_are_not_measured() -> None:
    costs = CostModel()
    for _ in range(100):
        costs.record_compute(96, 32, 0.5)
    assert not costs.worth_loading(16 * 100_000, 0, 16)
    costs.record_compute(96, 64, 0.5)
    assert costs.worth_loading(16 * 100_000, 0, 16)


def test_a_step_counts_once_the_device_has_computed_it() -> None:
    timer = SimpleNamespace(seconds=None)
    with tiers_of(1) as tiers:
        save(tiers, 1)
        tiers.record_compute(512, 512, cast("Any", timer))
        tiers.costs.record_load(Medium.HOST, MIB, 10.0)
        assert not tiers.worth_loading([key(1)], 4), "nothing is measured yet"
        timer.seconds = 512.0
        assert tiers.worth_loading([key(1)], 4)


def test_the_effect_of_one_slow_copy_decays() -> None:
    costs = CostModel()
    costs.record_compute(512, 512, 1.0)
    costs.record_load(Medium.DISK, MIB, 60.0)
    refusals = 0
    while not costs.worth_loading(0, MIB, 64):
        refusals += 1
        assert refusals < 1000
    assert refusals > 3


def test_the_cost_of_a_block_depends_on_its_medium(tmp_path: Path) -> None:
    with tiers_of(1, tmp_path, 100) as tiers:
        save(tiers, 1, 2)  # the second one displaced the first
        tiers.costs.record_compute(512, 512, 512.0)
        assert tiers.worth_loading([key(1), key(2)], 8)
        tiers.costs.record_load(Medium.HOST, MIB, 1e6)
        assert tiers.worth_loading([key(1)], 8)
        assert not tiers.worth_loading([key(2)], 8)
        tiers.costs.record_load(Medium.DISK, MIB, 1e6)
        assert not tiers.worth_loading([key(1)], 8)


class TestAgreement:
    """Ranks with different disks open a sequence with the longest prefix that all of them store."""

    @staticmethod
    def run(ranks: list[set[int]], most: int = 10) -> int:
        """The agreed length. Every rank can load some prefix lengths, and all ranks take part in every round."""
        bound, rounds = most, 0

        def agree(_: int) -> int:
            nonlocal rounds
            rounds += 1
            return min(longest(rank, bound) for rank in ranks)

        def longest(rank: set[int], bound: int) -> int:
            return max((length for length in rank | {0} if length <= bound), default=0)

        def remember(limit: int) -> int:
            nonlocal bound
            bound = limit
            return longest(ranks[0], limit)

        answer = agreed_length(remember, most, agree)
        assert rounds <= 1 + sum(len(rank) + 1 for rank in ranks)
        return answer

    def test_ranks_agree_on_the_smallest_of_their_longest_lengths(self) -> None:
        assert self.run([set(range(8)), set(range(5))]) == 4
        assert self.run([set(range(8)), {0}]) == 0
        assert self.run([set(range(8))]) == 7

    def test_a_length_that_one_rank_cannot_load_is_skipped(self) -> None:
        # With windows a longer prefix may be available where a shorter one is not.
        assert self.run([{2, 5, 9}, {2, 4, 8, 9}]) == 9
        assert self.run([{2, 5, 8}, {2, 4, 9}]) == 2
        assert self.run([{5, 8}, {4, 9}]) == 0
