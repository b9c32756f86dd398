"""The figures of a race follow from the recorded passes."""

from __future__ import annotations

import pytest

from deploy.bench.contestants.answers import Arrival, BenchAnswer, BenchPass, BenchPrompt, PassRequest
from deploy.bench.measuring import measures
from deploy.bench.measuring.exactness import Judge, compare, first_difference, noise_gap
from deploy.bench.measuring.results import Exactness


def answer(*arrivals: tuple[float, int, int], drafted: int = 0) -> BenchAnswer:
    """An answer from (seconds, tokens, accepted) per commit."""
    tokens = tuple(range(sum(count for _, count, _ in arrivals)))
    return BenchAnswer(tokens, tuple(Arrival(*arrival) for arrival in arrivals), len(tokens), drafted, len(arrivals))


def rated(rate: float) -> BenchPass:
    """A pass of 10 tokens at `rate` tokens per second."""
    return BenchPass((answer((1.0, 10, 0)),), 10 / rate)


def test_a_ratio_divides_by_the_mean_of_the_plain_passes_before_and_after() -> None:
    assert measures.speed_ratios([rated(10), rated(30), rated(10)], [rated(40), rated(10)]) == pytest.approx([2.0, 0.5])


def test_a_ratio_needs_a_plain_pass_on_both_sides() -> None:
    with pytest.raises(ValueError, match="needed 2 passes around 1, found 1"):
        measures.speed_ratios([rated(10)], [rated(10)])
    assert measures.speed_ratios([], [rated(10)]) == []


def test_drift_compares_plain_passes_that_follow_each_other() -> None:
    assert measures.drift([rated(10), rated(20), rated(10)]) == pytest.approx([2.0, 0.5])


def test_tau_counts_tokens_per_target_step() -> None:
    found = BenchPass((answer((0.1, 1, 0), (0.2, 3, 2), (0.3, 4, 3)),), 1.0)
    assert measures.committed_per_step([found]) == pytest.approx(8 / 3)
    assert measures.committed_per_step([BenchPass((BenchAnswer((), (), 0),), 1.0)]) is None


def test_acceptance_by_position_counts_every_step() -> None:
    found = BenchPass((answer((0.1, 1, 0), (0.2, 3, 2), (0.3, 4, 3), (0.4, 1, 0)),), 1.0)
    assert measures.acceptance_by_position([found]) == [0.5, 0.5, 0.25]
    assert measures.acceptance_by_position([rated(10)]) == []


def test_a_step_computes_one_token_and_the_drafted_ones() -> None:
    found = BenchPass((answer((0.1, 1, 0), (0.2, 3, 2), drafted=6),), 1.0)
    assert measures.per_committed_token([found]) == (0.5, 2.0)
    assert measures.drafted_tokens([found]) == (6, 2)


def test_latencies_are_percentiles_over_answers() -> None:
    found = BenchPass(tuple(answer((0.1 * number, 1, 0), (0.1 * number + 2.0, 4, 0)) for number in (1, 2, 3)), 1.0)
    assert measures.first_token_percentiles([found]) == pytest.approx([0.2, 0.3, 0.3])
    assert measures.per_token_percentiles([found]) == pytest.approx([0.5, 0.5, 0.5])


def test_an_answer_of_one_commit_has_no_time_per_token() -> None:
    assert answer((0.5, 3, 0)).seconds_per_token is None
    assert BenchAnswer((), (), 0).first_token_seconds is None


def test_a_percentile_is_one_of_the_values() -> None:
    assert measures.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert measures.percentile([], 0.5) is None


def test_a_spread_is_printed_with_its_range() -> None:
    assert str(measures.spread([1.0, 3.0, 2.0])) == "2.00 (1.00–3.00)"
    assert str(measures.spread([1.234])) == "1.23"
    assert measures.spread([]) is None


def test_the_first_difference_is_a_token_or_an_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


class TestExactness:
    """Answers are equal, explained by rounding, or wrong."""

    def one(self, *tokens: int, text: str = "") -> BenchPass:
        return BenchPass((BenchAnswer(tokens, (), len(tokens), text=text),), 1.0)

    async def classify(
        self, plain: BenchPass, found: BenchPass, gap: float | None, temperature: float = 0.0, shares_noise: bool = True
    ) -> Exactness:
        async def asked(context: tuple[int, ...], expected: int, other: int) -> float | None:
            assert (context, expected, other) == ((9, 1, 2), 3, 4)
            return gap

        request = PassRequest((BenchPrompt((9,), "nine"),), 1, temperature, 0, 3)
        return await compare(request, plain, found, asked, Judge(0.5, shares_noise=shares_noise))

    async def test_the_same_tokens_are_equal(self) -> None:
        assert await self.classify(self.one(1, 2, 3), self.one(1, 2, 3), None) == Exactness(equal=1)

    async def test_close_logits_explain_a_difference(self) -> None:
        found = await self.classify(self.one(1, 2, 3), self.one(1, 2, 4), 0.25)
        assert found == Exactness(explained=1, largest_gap=0.25)

    @pytest.mark.parametrize("gap", [0.75, None])
    async def test_distant_or_unknown_logits_make_a_difference_wrong(self, gap: float | None) -> None:
        assert (await self.classify(self.one(1, 2, 3), self.one(1, 2, 4), gap)).wrong == 1

    async def test_a_shorter_answer_is_wrong(self) -> None:
        assert (await self.classify(self.one(1, 2, 3), self.one(1, 2), 0.0)).wrong == 1

    async def test_noise_counts_for_a_sampled_answer(self) -> None:
        noise = noise_gap(0, 3, 3, 4)
        close = await self.classify(self.one(1, 2, 3), self.one(1, 2, 4), 0.25 - noise, temperature=1.0)
        assert close.explained == 1 and close.largest_gap == pytest.approx(0.25)
        far = await self.classify(self.one(1, 2, 3), self.one(1, 2, 4), 0.75 - noise, temperature=1.0)
        assert far.wrong == 1

    async def test_samples_of_other_random_numbers_are_not_compared(self) -> None:
        plain, found = self.one(1, 2, 3), self.one(5, 6)
        assert await self.classify(plain, found, None, 1.0, shares_noise=False) == Exactness(not_compared=1)

    async def test_texts_without_tokens_are_equal_or_not_compared(self) -> None:
        assert await self.classify(self.one(text="a"), self.one(text="a"), None) == Exactness(equal=1)
        assert await self.classify(self.one(text="a"), self.one(text="b"), None) == Exactness(not_compared=1)
