"""What is collected of a sequence to learn from: hidden states from before the end of the prompt on, with consent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import Evidence
from cluster.core.request import SequenceStart
from cluster.core.tree import TokenTree
from tests.unit.draft.rows import GREEDY, SIZE, STATES, TAPS, TOKENS, shown
from workers.draft.common.learning import CollectedText, Reservoir, consecutive
from workers.draft.common.modules import text_collector
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


def test_a_long_answer_is_collected_as_far_as_its_states_are_known_and_read_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The serving loop pays nothing for what is not collected, and measures take no steps that know no states."""
    monkeypatch.setattr(text_collector, "_MOST_COLLECTED", 10)
    read: list[tuple[int, int]] = []
    plain = TapReader.read

    def recorded(
        self: TapReader, evidence: Evidence, oldest: int = 0, most: int | None = None
    ) -> tuple[int, torch.Tensor] | None:
        found = plain(self, evidence, oldest, most)
        if found is not None:
            read.append((found[0], len(found[1])))
        return found

    monkeypatch.setattr(TapReader, "read", recorded)
    reader = TapReader(TAPS, TargetSection.model_validate({"evidence": {"taps": TAPS}}), SIZE)
    collector, reservoir = TextCollector(reader, 5), Reservoir(1 << 20)
    collector.collect_into(reservoir)
    sequence = Sequence(SequenceStart(PROMPT, GREEDY, allows_learning=True))
    for first, end in ((0, 100), (100, PROMPT), *((number, number + 1) for number in range(PROMPT, LENGTH - 1))):
        collector.take(sequence, [shown(first, end)])
    collector.finish(sequence)
    assert read == [(PROMPT - 6, 6), *((number, 1) for number in range(PROMPT, PROMPT + 4))]
    ((text,),) = ([*one.training, *one.left_out, *one.held_back] for one in reservoir.salts())
    assert (text.first, text.tokens) == (PROMPT - 6, tuple(TOKENS[: PROMPT + 6]))
    assert torch.equal(text.hidden, STATES[PROMPT - 6 : PROMPT + 4])


def test_what_is_collected_of_changed_tokens_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_collector, "_MOST_COLLECTED", 10)
    reader = TapReader(TAPS, TargetSection.model_validate({"evidence": {"taps": TAPS}}), SIZE)
    collector, reservoir = TextCollector(reader), Reservoir(1 << 20)
    collector.collect_into(reservoir)
    sequence = Sequence(SequenceStart(PROMPT, GREEDY, allows_learning=True))
    collector.take(sequence, [shown(PROMPT, PROMPT + 8)])
    sequence.collected.forget()
    collector.take(sequence, [shown(PROMPT, PROMPT + 8)])
    assert [(first, len(rows)) for first, rows in sequence.collected.pieces] == [(PROMPT, 8)]


def test_an_answer_of_one_token_teaches_nothing() -> None:
    """Else a client with such answers alone would start trainings that cannot end well."""
    reader = TapReader(TAPS, TargetSection.model_validate({"evidence": {"taps": TAPS}}), SIZE)
    collector, reservoir = TextCollector(reader, 64), Reservoir(1 << 20)
    collector.collect_into(reservoir)
    for length, seen in ((PROMPT + 1, 0), (PROMPT + 2, 1)):
        sequence = Sequence(SequenceStart(PROMPT, GREEDY, allows_learning=True), TOKENS[:length])
        collector.take(sequence, [shown(0, length - 1)])
        assert sequence.collected.positions
        collector.finish(sequence)
        assert reservoir.seen == seen
    assert reservoir.reserve((1 << 20) // 2)


@pytest.mark.parametrize(
    ("tree", "failures"),
    [
        (TokenTree(), ()),
        (TokenTree.chain(TOKENS[PROMPT : PROMPT + 3]), ()),
        (TokenTree.chain([*TOKENS[PROMPT : PROMPT + 2], 0]), (PROMPT + 2,)),
        (TokenTree.chain([0, *TOKENS[PROMPT + 1 : PROMPT + 3]]), (PROMPT,)),
        (TokenTree.from_candidates([[0], [TOKENS[PROMPT]]], 8), ()),
        (TokenTree.from_candidates([[TOKENS[PROMPT], 0], [TOKENS[PROMPT], 1]], 8), (PROMPT + 1,)),
    ],
    ids=["no draft", "all right", "the third is wrong", "the first is wrong", "one of two is right", "both are wrong"],
)
def test_the_position_is_known_at_which_all_that_was_drafted_was_rejected(
    tree: TokenTree, failures: tuple[int, ...]
) -> None:
    assert not {0, 1} & set(TOKENS[PROMPT : PROMPT + 3])
    reader = TapReader(TAPS, TargetSection.model_validate({"evidence": {"taps": TAPS}}), SIZE)
    collector, reservoir = TextCollector(reader), Reservoir(1 << 20)
    collector.collect_into(reservoir)
    sequence = Sequence(SequenceStart(PROMPT, GREEDY, allows_learning=True))
    step = replace(shown(PROMPT - 1, PROMPT + 3), base_len=PROMPT, tree=tree)
    collector.take(sequence, [step])
    collector.take(sequence, [step])  # a message that came twice
    collector.finish(sequence)
    ((text,),) = ([*one.training, *one.left_out, *one.held_back] for one in reservoir.salts())
    assert text.failures == failures


def test_the_last_run_of_positions_is_kept_with_the_latest_rows() -> None:
    """Pieces in any order, with gaps and repetitions."""
    random = Random(5)
    for _ in range(300):
        pieces = []
        for number in range(random.randrange(6)):
            first, length = random.randrange(20), random.randrange(6)
            pieces.append((first, torch.full((length, 2), float(number)).bfloat16()))
        rows = {first + index: row for first, piece in pieces for index, row in enumerate(piece)}
        found = consecutive(pieces)
        if not rows:
            assert found is None
            continue
        first = end = max(rows)
        while first - 1 in rows:
            first -= 1
        assert found is not None and found[0] == first
        assert torch.equal(found[1], torch.stack([rows[position] for position in range(first, end + 1)]))
