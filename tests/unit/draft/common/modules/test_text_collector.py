"""What is collected of a sequence to learn from: hidden states from before the end of the prompt on, with consent."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.request import SequenceStart
from tests.unit.draft.rows import GREEDY, SIZE, STATES, TAPS, TOKENS, shown
from workers.draft.common.learning import CollectedText, Reservoir
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import CollectedStates, TextCollector

PROMPT, LENGTH = 150, 170


@dataclass
class Sequence:
    """A finished sequence."""

    start: SequenceStart
    tokens: list[int] = field(default_factory=lambda: TOKENS[:LENGTH])
    collected: CollectedStates = field(default_factory=CollectedStates)


def collected(before: int = 0, most_bytes: int = 1 << 20, *, allows: bool = True) -> tuple[CollectedText, ...]:
    """What a reservoir gets of a sequence that was shown in three pieces."""
    reader = TapReader(TAPS, TargetSection.model_validate({"evidence": {"taps": TAPS}}), SIZE)
    collector, reservoir = TextCollector(reader, before), Reservoir(most_bytes)
    collector.collect_into(reservoir)
    sequence = Sequence(SequenceStart(PROMPT, GREEDY, allows_learning=allows))
    for first, end in ((0, 100), (100, PROMPT), (PROMPT, LENGTH - 1)):
        collector.take(sequence, [shown(first, end)])
    collector.finish(sequence)
    assert reservoir.reserve(most_bytes // 2)  # nothing is counted any more
    return tuple(text for texts in reservoir.salts() for text in (*texts.training, *texts.left_out, *texts.held_back))


@pytest.mark.parametrize("before", [0, 20, 80, 1000])
def test_hidden_states_of_all_taps_are_collected_from_before_the_end_of_the_prompt_on(before: int) -> None:
    (text,) = collected(before)
    assert text.first == max(0, PROMPT - 1 - before)
    assert torch.equal(text.hidden, STATES[text.first : LENGTH - 1])
    assert (text.tokens, text.base_len) == (tuple(TOKENS[:LENGTH]), PROMPT + 1)


def test_nothing_is_collected_without_consent() -> None:
    assert collected(20, allows=False) == ()


def test_what_does_not_fit_into_the_reservoir_is_left_out() -> None:
    assert collected(1000, most_bytes=4 * SIZE) == ()
