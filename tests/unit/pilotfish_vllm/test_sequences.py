"""A sequence is known by its tokens: vLLM names none."""

from __future__ import annotations

import numpy as np

from pilotfish_vllm import sequences
from pilotfish_vllm.sequences import Sequences


def match(known: Sequences, rows: dict[int, list[int]], now: float = 0.0) -> dict[int, str]:
    found, _ = known.match({index: np.array(row, np.int32) for index, row in rows.items()}, now)
    return {index: one.id for index, one in found.items()}


def test_a_row_that_goes_on_is_the_same_sequence() -> None:
    known = Sequences()
    first = match(known, {0: [1, 2], 1: [3, 4]})
    assert match(known, {0: [1, 2, 5], 1: [3, 4, 6, 7]}) == first


def test_a_row_that_moves_is_the_same_sequence() -> None:
    known = Sequences()
    first = match(known, {0: [1, 2], 1: [3, 4]})
    assert match(known, {0: [3, 4, 6]}) == {0: first[1]}


def test_another_request_in_the_same_row_is_another_sequence() -> None:
    known = Sequences()
    first = match(known, {0: [1, 2, 3]})
    assert match(known, {0: [1, 2, 4, 5]}) != first
    assert match(known, {0: [1]})[0] not in first.values()


def test_rows_with_the_same_tokens_are_different_sequences() -> None:
    found = match(Sequences(), {0: [1, 2], 1: [1, 2]})
    assert found[0] != found[1]


def test_a_row_takes_the_longest_sequence_that_it_continues() -> None:
    known = Sequences()
    first = match(known, {0: [1], 1: [1, 2, 3], 2: [1, 2]})
    assert match(known, {5: [1, 2, 3, 4]}) == {5: first[1]}


def test_a_preempted_sequence_is_known_when_it_returns() -> None:
    known = Sequences()
    first = match(known, {0: [1, 2], 1: [3, 4]})
    for step in range(sequences.MOST_ABSENT_CALLS):
        match(known, {0: [1, 2, *range(step)]})
    assert match(known, {1: [3, 4, 5]}) == {1: first[1]}


def test_a_sequence_ends_when_many_calls_lack_it() -> None:
    known = Sequences()
    match(known, {0: [1, 2], 1: [3, 4]})
    ended: list[str] = []
    for step in range(sequences.MOST_ABSENT_CALLS + 2):
        _, over = known.match({0: np.array([1, 2, *range(step)], np.int32)}, 0.0)
        ended += [one.id for one in over]
    assert ended == ["2"]


def test_sequences_end_when_no_call_comes() -> None:
    known = Sequences()
    match(known, {0: [1, 2]}, now=1.0)
    match(known, {1: [3, 4]}, now=5.0)
    assert [one.id for one in known.end_idle(1.5 + sequences.IDLE_SECONDS)] == ["1"]
    assert [one.id for one in known.end_idle(5.5 + sequences.IDLE_SECONDS)] == ["2"]
    assert match(known, {1: [3, 4, 5]}) == {1: "3"}
