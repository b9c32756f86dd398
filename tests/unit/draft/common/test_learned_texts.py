"""Texts to learn from take bounded memory, by client, and stay in their part."""

from __future__ import annotations

import pytest
import torch

from cluster.core.config.target_section import EvidenceSection, TargetSection
from cluster.core.ids import CacheSalt
from cluster.core.request import SamplingParameters, SequenceStart
from workers.draft.common.learning import CollectedText, Reservoir, salt_key
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.modules.text_collector import TextCollector


def collected(salt: str, tokens: int = 8) -> CollectedText:
    start = SequenceStart(1, SamplingParameters(), CacheSalt(salt), allows_learning=True)
    return CollectedText(start, tuple(range(tokens)), 0, torch.zeros(tokens, 4, dtype=torch.bfloat16))


def test_texts_take_no_more_memory_than_allowed_and_a_client_drops_its_own() -> None:
    most = 40 * collected("a/").size
    reservoir = Reservoir(2 * most)
    reservoir.add(collected("small/"))
    for number in range(200):
        reservoir.add(collected(f"large/{number}"))
        assert reservoir.stored_bytes <= most
    kept = {one.key: len(one.training) + len(one.left_out) + len(one.held_back) for one in reservoir.salts()}
    assert kept[salt_key("small/")] == 1
    assert len(kept) <= 64
    reservoir.add(collected("huge/", 2000))
    assert salt_key("huge/") not in {one.key for one in reservoir.salts()}
    assert reservoir.seen == 201


def test_a_closed_reservoir_has_no_texts_and_takes_none() -> None:
    reservoir = Reservoir(1 << 20)
    reservoir.add(collected("a/"))
    assert reservoir.stored_bytes > 0
    reservoir.close()
    reservoir.add(collected("a/"))
    assert (reservoir.salts(), reservoir.stored_bytes, reservoir.seen) == ((), 0, 1)


def test_a_text_stays_in_its_part_so_that_no_later_training_learns_from_it() -> None:
    """Weights that have learned from a text would seem better on it than any that follow, and learning would end."""
    reservoir = Reservoir(1 << 20)
    parts: list[set[int]] = [set(), set(), set()]
    for number in range(200):
        reservoir.add(collected("a/", 8 + number))
        (texts,) = reservoir.salts()
        for part, now in zip(parts, (texts.training, texts.left_out, texts.held_back), strict=True):
            part.update(len(text.tokens) for text in now)
    training, left_out, held_back = parts
    assert len(training) + len(left_out) + len(held_back) == 200
    assert 20 < len(left_out) < 60 and 30 < len(held_back) < 70


@pytest.mark.parametrize(
    ("taps", "hidden_size", "expected", "texts"),
    [
        (1, 48, 64 << 20, 341),
        (1, 896, 96 * 1024 * 2 * 896, 48),
        (3, 4096, 2 << 30, 42),
        (5, 16384, 2 << 30, 6),
    ],
    ids=["tiny", "0.5B", "8B", "largest"],
)
def test_the_default_memory_follows_the_width_that_the_draft_reads(
    taps: int, hidden_size: int, expected: int, texts: int
) -> None:
    """Half of it holds so many finished texts of the longest length. A training needs about 32."""
    numbers = tuple(range(taps))
    reader = TapReader(numbers, TargetSection(evidence=EvidenceSection(taps=numbers)), hidden_size)
    assert TextCollector(reader).default_bytes == expected
    assert expected // 2 // (1024 * 2 * taps * hidden_size) == texts


def test_what_is_still_collected_has_a_bound_too() -> None:
    reservoir = Reservoir(100)
    assert reservoir.reserve(50)
    assert not reservoir.reserve(1)
    reservoir.free(50)
    assert reservoir.reserve(50)
