"""Tokens per step around an oracle are counted as a target's steps give them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.interop.draft_formats import COMPARISONS, Rates, accepted
from tests.interop.draft_rates import LENGTH, PROMPTS, Rate, Target, rate_of_oracle
from tests.interop.trained_drafts import DRAFTS, LAYERS_OF_TARGETS, damped_target
from tests.support.models.shown_target import Shown

DEPTH = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return damped_target(tmp_path_factory.mktemp("damped") / "target")


def test_each_format_has_a_draft() -> None:
    assert [one.format for one in COMPARISONS if one.format not in {**DRAFTS, **LAYERS_OF_TARGETS}] == []


@pytest.mark.slow
@pytest.mark.parametrize("right", range(DEPTH + 1))
def test_a_step_gives_the_tokens_that_agree_and_one_more(right: int, target: Target) -> None:
    """The oracle knows the answers, but for all tokens of its chains behind the first `right` ones."""
    seen: list[int] = []

    def chain(tokens: Sequence[int], shown: Shown, count: int) -> list[int]:
        assert len(shown.final) == len(shown.states[0]) == len(tokens) - 1
        (text,) = (one for one in target.texts if one[: len(tokens)] == list(tokens))
        seen.append(count)
        following = text[len(tokens) : len(tokens) + count]
        return [token if place < right else (token + 1) % 320 for place, token in enumerate(following)]

    found = rate_of_oracle(target, chain, DEPTH)

    steps = -(-(LENGTH - 1) // (right + 1))
    assert found == Rate(len(PROMPTS) * (LENGTH - 1), len(PROMPTS) * steps)
    assert max(seen) == DEPTH and len(seen) == found.steps


@pytest.mark.slow
def test_a_trained_draft_is_as_good_here(tmp_path: Path) -> None:
    here, there = Rates(tmp_path).of("Hydra")

    assert here == there
    assert accepted(here, there)[1]
    assert not accepted(Rate(here.tokens, here.tokens), there)[1]
