"""Serving in pairs: the settings of the two clusters, their prompts, and the ratio of their rates."""

from __future__ import annotations

import pytest

from tests.bench import options
from tests.bench.__main__ import SECTIONS
from tests.bench.client import Answer, Answers
from tests.bench.options import Options
from tests.bench.sections import serving_pairs
from tests.bench.sections.serving_pairs import PairPrompts, Pairs


def parse(*arguments: str) -> Options:
    return options.parse(SECTIONS, ["serving-pairs", *arguments])[1]


def answers(tokens: list[int], seconds: float) -> Answers:
    return Answers([Answer(0.0, tokens, [1.0] * len(tokens), steps=1)], seconds)


def test_a_ratio_compares_the_two_clusters_of_one_pair() -> None:
    pairs = Pairs([answers([1, 2], 1.0), answers([1, 2], 2.0)], [answers([1, 2], 2.0), answers([1, 3], 2.0)])

    assert pairs.ratios == [0.5, 1.0]
    assert pairs.equal == 1


def test_only_the_drafted_cluster_has_a_draft_model_and_chosen_settings_come_last() -> None:
    asked = parse("--set", "target.dtype=float32")

    assert serving_pairs.assignments(asked, "none") == [
        "target.dtype=bfloat16",
        "draft.method=none",
        "target.dtype=float32",
    ]
    assert "draft.model.path=smollm2-135m-draft" in serving_pairs.assignments(asked, "model")


def test_few_requests_in_flight_have_more_turns() -> None:
    assert [serving_pairs.turns(batch) for batch in (1, 8, 32, 64, 256)] == [8, 8, 4, 2, 2]


def test_no_two_measurements_share_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Options, "prompts", lambda self, most: [(index,) for index in range(most)])
    prompts = PairPrompts(parse("--pairs", "3"), (4, 8))

    chosen = [prompts.warm_up(batch) for batch in (4, 8)]
    chosen += [prompts.of_pair(pair, batch) for pair in range(3) for batch in (4, 8)]

    flat = [prompt for some in chosen for prompt in some]
    assert [len(some) for some in chosen] == [8 * 4, 8 * 8] * 4
    assert len(set(flat)) == len(flat)
